"""OpenVINO GenAI's continuous batching, which comes without a server: openvino_server.py puts one in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.peers.gguf import embedded_gguf
from bench.peers.peer import Peer, environment_of

_PACKAGES = ("openvino-genai>=2026.4,<2027", "aiohttp>=3.12,<4")


class OpenVino(Peer):
    """Reads the GGUF itself."""

    name = "OpenVINO GenAI"
    weights = "from GGUF"
    weight_bits = None
    model = "smollm2"

    def install(self, root: Path, console: Console) -> None:
        """Wheels only."""
        environment_of(root / "openvino", _PACKAGES, console)

    def command(self, root: Path, port: int) -> Sequence[str]:
        """Our thin server in its environment."""
        server = Path(__file__).with_name("openvino_server.py")
        python = str(root / "openvino" / "bin" / "python")
        return (python, "-P", str(server), str(embedded_gguf()), str(port))  # -P: this folder has an openvino.py too

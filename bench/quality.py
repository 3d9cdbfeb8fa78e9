"""What a weights format costs in quality: perplexity, and how often the likeliest token is the one that fp32 gives.

    python -m bench.quality [--tokens 4096] [--formats int8]

The tokens are this repository's own texts, read in windows and teacher-forced; the judge is the exact format of the
same engine, which the tests hold to transformers. Written to build/bench/quality.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.machine import machine
from cli.model_source import model_directory
from kernels.cpu import Batch, CpuModel, FloatArray
from services.scheduler.engine.cpu_engine import FORMATS
from services.scheduler.model.config_json import read_config
from services.scheduler.model.packed import pack_weights, shape_of

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("build/bench/quality.json")
TEXTS = (
    "README.md",
    "docs/text.md",
    "docs/decisions/0001-contracts.md",
    "docs/inputs.md",
    "services/protocol/parse.py",
)
WINDOW, PIECE, BLOCK = 512, 64, 16
CLEAR_MARGIN = 0.5


@dataclass(slots=True)
class Score:
    """Sums over tokens: negative log-likelihood in nats, agreements with the judge, and those where it was sure."""

    tokens: int = 0
    loss: float = 0.0
    agreed: int = 0
    clear: int = 0
    clear_agreed: int = 0

    def summary(self) -> dict[str, float]:
        """What is reported."""
        return {
            "tokens": self.tokens,
            "perplexity": math.exp(self.loss / self.tokens),
            "agreement": self.agreed / self.tokens,
            "agreement_where_margin_above_half": self.clear_agreed / max(self.clear, 1),
        }


class Reader:
    """One model that reads windows: every position's logits, piece by piece."""

    def __init__(self, folder: Path, weights_format: str) -> None:
        config, stored = read_config(folder), FORMATS[weights_format]
        blocks = WINDOW // BLOCK
        shape = shape_of(config, weights_format=stored, kv_format=stored, blocks=blocks, block_size=BLOCK)
        self._model = CpuModel(shape, threads=2)
        pack_weights(folder, config, self._model)

    def logits(self, window: Sequence[int]) -> Iterator[tuple[int, FloatArray]]:
        """(position, logits after it) for a window of ids; the rows are overwritten by the next piece."""
        # Each position is a sequence of its own in the same blocks, so that each can ask for its logits.
        for start in range(0, len(window), PIECE):
            piece = window[start : start + PIECE]
            table = list(range(WINDOW // BLOCK))
            self._model.step(Batch([piece], [start], [table], []))
            positions = list(range(start, start + len(piece)))
            rows = Batch([[token] for token in piece], positions, [table] * len(piece), range(len(piece)))
            yield from zip(positions, self._model.step(rows).logits, strict=True)


def score(judged: Reader, judge: Reader, window: Sequence[int], scores: tuple[Score, Score]) -> None:
    """Adds one window to the scores of the judged format and of the judge."""
    pairs = zip(judged.logits(window), judge.logits(window), strict=True)
    for (position, ours), (_, exact) in pairs:
        if position + 1 == len(window):
            return
        target = window[position + 1]
        second, best = np.partition(exact, -2)[-2:]
        agrees = int(ours.argmax() == exact.argmax())
        for logits, total in zip((ours, exact), scores, strict=True):
            total.tokens += 1
            total.loss += _loss(logits, target)
        scores[0].agreed += agrees
        if best - second > CLEAR_MARGIN:
            scores[0].clear += 1
            scores[0].clear_agreed += agrees


def _loss(logits: FloatArray, target: int) -> float:
    wide = logits.astype(np.float64)
    top = wide.max()
    return float(np.log(np.exp(wide - top).sum()) + top - wide[target])


def windows(folder: Path, tokens: int) -> list[list[int]]:
    """The repository's texts, cut into windows that hold so many tokens together."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [token for name in TEXTS for token in tokenizer.encode((ROOT / name).read_text(encoding="utf-8")).ids]
    return [ids[start : start + WINDOW] for start in range(0, min(tokens, len(ids) - 1), WINDOW)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per format and writes them."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="how many to score (default: 4096)")
    parser.add_argument("--formats", default="int8", help="by comma (default: int8)")
    options = parser.parse_args(argv)
    folder = model_directory(None)
    texts, judge, found = windows(folder, options.tokens), Reader(folder, "fp32"), {}
    for name in options.formats.split(","):
        judged, scores = Reader(folder, name), (Score(), Score())
        for number, window in enumerate(texts, 1):
            score(judged, judge, window, scores)
            print(f"\r{name}: window {number} of {len(texts)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        exact = math.exp(scores[1].loss / scores[1].tokens)
        found[name] = {**scores[0].summary(), "perplexity_fp32": exact, "sums": asdict(scores[0])}
        print(
            f"{name}: {scores[0].tokens} tokens, perplexity {found[name]['perplexity']:.3f} (fp32 {exact:.3f}), "
            f"agreement {found[name]['agreement']:.4f}, "
            f"where fp32 leads by over {CLEAR_MARGIN}: {found[name]['agreement_where_margin_above_half']:.4f}"
        )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"machine": machine(), "model": folder.name, "formats": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

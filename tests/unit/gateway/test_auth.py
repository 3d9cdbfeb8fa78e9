from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from gateway.auth import BadKeysFile, Tenants
from services.runtime.errors import Unauthenticated

KEYS = """
[tenants.alice]
keys = ["sk-alice-1", "sha256:{digest}"]
open_max = 3

[tenants.bob]
keys = ["sk-bob"]
"""


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def unix_ms(self) -> int:
        return 0


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS.format(digest=hashlib.sha256(b"sk-alice-2").hexdigest()))
    return path


def test_without_a_file_everybody_is_the_only_tenant() -> None:
    assert Tenants(None, HandClock()).name_of(None) == ""


@pytest.mark.parametrize(
    ("key", "tenant"), [("sk-alice-1", "alice"), ("sk-alice-2", "alice"), ("sk-bob", "bob"), ("sk-bob ", "bob")]
)
def test_a_key_tells_its_tenant(keys_file: Path, key: str, tenant: str) -> None:
    assert Tenants(keys_file, HandClock()).name_of(f"Bearer {key}") == tenant


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Basic sk-bob", "sk-bob", "Bearer sk-bo", "Bearer \udcff"]
)
def test_without_a_known_key_nobody_is_let_in(keys_file: Path, value: str | None) -> None:
    with pytest.raises(Unauthenticated) as refused:
        Tenants(keys_file, HandClock()).name_of(value)
    assert "sk-" not in refused.value.message


def test_a_tenant_may_have_a_limit_of_its_own(keys_file: Path) -> None:
    tenants = Tenants(keys_file, HandClock())
    assert tenants.open_max_of("alice") == 3
    assert tenants.open_max_of("bob") is None


def test_a_revoked_key_stops_within_a_second_and_the_others_go_on(keys_file: Path) -> None:
    clock = HandClock()
    tenants = Tenants(keys_file, clock)
    keys_file.write_text('[tenants.alice]\nkeys = ["sk-alice-1"]\n')
    clock.time += 0.9
    with pytest.raises(Unauthenticated):
        tenants.name_of("Bearer sk-bob")
    assert tenants.name_of("Bearer sk-alice-1") == "alice"


@pytest.mark.parametrize("change", ["broken", "gone"])
def test_a_keys_file_that_breaks_later_lets_nobody_in_until_it_is_mended(
    keys_file: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = HandClock()
    tenants = Tenants(keys_file, clock)
    good = keys_file.read_text()
    if change == "broken":
        keys_file.write_text('[tenants.alice]\nkeys = ["sk-secret"')
    else:
        keys_file.unlink()
    clock.time += 1
    with caplog.at_level(logging.DEBUG), pytest.raises(Unauthenticated):
        tenants.name_of("Bearer sk-alice-1")
    assert "sk-" not in caplog.text
    keys_file.write_text(good + "\n")
    clock.time += 1
    assert tenants.name_of("Bearer sk-alice-1") == "alice"


@pytest.mark.parametrize(
    "text",
    [
        "keys = 5",
        "[tenants]\nalice = 5",
        '[tenants.alice]\nkeys = "sk-secret"',
        "[tenants.alice]\nkeys = [5]",
        '[tenants.alice]\nkeys = [""]',
        '[tenants.alice]\nkeys = ["sk-secret"]\nopen_max = 0',
        '[tenants.alice]\nkeys = ["sk-secret"]\nopen_maxx = 1',
        '[tenants.alice]\nkeys = ["sk-secret"]\n[tenants.bob]\nkeys = ["sk-secret"]',
        '[tenants.alice]\nkeys = ["sk-secret"',
    ],
)
def test_a_bad_keys_file_is_refused_at_the_start_without_quoting_a_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(BadKeysFile) as refused:
        Tenants(path, HandClock())
    assert "sk-" not in str(refused.value)

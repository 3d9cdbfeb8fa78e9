"""Who calls: tenants by API key, from a file that is read again when it changes. Without a file everybody is tenant "".

[tenants.alice]
keys = ["sha256:2bb80d53…", "a-key-in-clear"]
open_max = 8          # requests open at once; without it only the gateway's own limit counts
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.clock import Clock
from services.runtime.errors import Unauthenticated
from services.runtime.log import get_logger

REREAD_S = 0.5
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")

_log = get_logger("gateway")


class BadKeysFile(ValueError):
    """The keys file can't be used; the message never holds a key."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One entry of the file. `open_max`: requests open at once; None: only the gateway's own limit."""

    name: str
    open_max: int | None = None


class Tenants:
    """Tells the tenant of a key. Only digests are kept, so the time of a look-up tells nothing of a key."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Raises BadKeysFile when the file can't be used at the start; later that means nobody is let in."""
        self._path = path
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = None
        self._checked_at = clock.now()
        self._keep({})
        if path is not None:
            self._stamp = _stamp(path)
            self._keep(read_keys(path))

    def name_of(self, authorization: str | None) -> str:
        """The tenant of an Authorization value ("Bearer <key>"). Raises Unauthenticated without a known key."""
        if self._path is None:
            return ""
        self._reread(self._path)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("an API key is needed: Authorization: Bearer <key>", reason="NO_API_KEY")
        tenant = self._by_digest.get(_digest(key.strip()))
        if tenant is None:
            raise Unauthenticated("this API key is not known", reason="INVALID_API_KEY")
        return tenant.name

    def open_max_of(self, name: str) -> int | None:
        """How many requests of a tenant may be open at once; None: only the gateway's own limit counts."""
        return self._open_max.get(name)

    def _reread(self, path: Path) -> None:
        now = self._clock.now()
        if now - self._checked_at < REREAD_S:
            return
        self._checked_at = now
        stamp = _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keep(read_keys(path))
        except BadKeysFile as error:
            # Nobody is let in: a revoked key may have been taken out of just this version.
            self._keep({})
            _log.error("keys file can't be used: every key is refused", why=str(error))
        else:
            _log.info("keys file read again", tenants=len(self._open_max))

    def _keep(self, by_digest: Mapping[bytes, Tenant]) -> None:
        self._by_digest = by_digest
        self._open_max = {tenant.name: tenant.open_max for tenant in by_digest.values()}


def read_keys(path: Path) -> dict[bytes, Tenant]:
    """The tenants of a keys file by SHA-256 of their keys. Raises BadKeysFile."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadKeysFile(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise BadKeysFile(f"{path} is not TOML") from None  # the parser's own message may quote a key
    tenants = document.get("tenants")
    if not isinstance(tenants, dict) or set(document) != {"tenants"}:
        raise BadKeysFile(f"{path} must hold tables [tenants.<name>] and nothing else")
    found: dict[bytes, Tenant] = {}
    for name, table in tenants.items():
        for digest in _digests(path, name, table):
            if digest in found:
                raise BadKeysFile(f"{path}: a key of tenant {name!r} is given twice")
            found[digest] = Tenant(name, table.get("open_max"))
    return found


def _digests(path: Path, name: str, table: Any) -> list[bytes]:
    at = f"{path}: tenant {name!r}"
    if not isinstance(table, dict) or not set(table) <= {"keys", "open_max"}:
        raise BadKeysFile(f"{at} must be a table of keys and open_max")
    keys, open_max = table.get("keys"), table.get("open_max")
    if not isinstance(keys, list) or not all(isinstance(key, str) and key for key in keys):
        raise BadKeysFile(f"{at}: keys must be a list of texts")
    if open_max is not None and (type(open_max) is not int or open_max < 1):
        raise BadKeysFile(f"{at}: open_max must be 1 or more")
    return [bytes.fromhex(hashed[1]) if (hashed := _HASHED.fullmatch(key)) else _digest(key) for key in keys]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when the file does; None when it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

"""API keys: where they come from, and which one a request shows."""

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from moeless.errors import ConfigError, os_reason
from moeless.server.limits import KeyLimits

ANYBODY = "anonymous"
"""Name of the account that everybody shares where no key is needed."""


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """One key.

    Args:
        name: What logs, limits and the ledger call its holder.
        secret: What its holder sends; never logged.
        limits: Limits of its own; None = those of the server's settings.

    Raises:
        ConfigError: The name or the secret cannot be used.
    """

    name: str
    secret: str = field(repr=False)
    limits: KeyLimits | None = None

    def __post_init__(self) -> None:
        if not self.secret.strip():
            raise ConfigError("an API key is empty: give at least one character, or no key")
        if not self.name or not self.name.isprintable() or self.name == ANYBODY:
            raise ConfigError(
                f"the name {self.name!r} cannot be that of a key: use letters and digits, "
                f"not {ANYBODY!r}"
            )


class KeyRing:
    """Finds the key that a request shows, in a time that tells nothing.

    Args:
        keys: The keys; none = everybody may enter.

    Raises:
        ConfigError: Two keys have one name, or are the same.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._names: list[str] = []
        self._digests: list[bytes] = []
        for key in keys:
            digest = _digest(key.secret.encode())
            if key.name in self._names:
                raise ConfigError(f"two API keys have the name {key.name!r}: rename one")
            if digest in self._digests:
                other = self._names[self._digests.index(digest)]
                raise ConfigError(f"the API keys {other!r} and {key.name!r} are the same")
            self._names.append(key.name)
            self._digests.append(digest)

    @property
    def is_open(self) -> bool:
        """Whether everybody may enter."""
        return not self._names

    def identify(self, authorization: bytes | None) -> str | None:
        """Name of the key in the value of an ``Authorization`` header; None if it has none.

        Without keys it is :data:`ANYBODY` for every request.
        """
        if self.is_open:
            return ANYBODY
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        # All keys are compared, and digests are of one length: time tells nothing.
        found: str | None = None
        for name, digest in zip(self._names, self._digests, strict=True):
            if hmac.compare_digest(digest, given):
                found = name
        return found if scheme.lower() == b"bearer" else None


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Read keys from a file that only its owner may read.

    A line is ``name:key``, after which limits of this key may follow, divided by blanks:
    ``requests_per_minute=60 tokens_per_minute=20000 concurrent=4``. Empty lines and lines that
    begin with ``#`` are skipped.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read, others may read it, or a line is wrong. The message has
            the number of the line and never a key.
    """
    try:
        # One descriptor for both, so that what was checked is what is read.
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
    except (OSError, UnicodeDecodeError) as exc:
        reason = os_reason(exc) if isinstance(exc, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from None
    if mode & 0o077:
        raise ConfigError(
            f"--api-key-file {path} has mode {mode:04o}: others may read the keys; "
            f"run chmod 600 {path}"
        )
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                keys.append(_parse_line(line))
            except ConfigError as exc:
                raise ConfigError(f"--api-key-file {path}, line {number}: {exc}") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key: write lines of name:key")
    return tuple(keys)


def _parse_line(line: str) -> ApiKey:
    entry, *options = line.split()
    name, colon, secret = entry.partition(":")
    if not colon:
        raise ConfigError("it has no colon: write name:key")
    return ApiKey(name=name, secret=secret, limits=_parse_limits(options) if options else None)


def _parse_limits(options: list[str]) -> KeyLimits:
    found: dict[str, int] = {}
    for option in options:
        name, _, value = option.partition("=")
        # What is not known is not quoted: it may be a part of a key with a blank in it.
        if name not in KeyLimits.__dataclass_fields__ or not value.isdecimal():
            known = ", ".join(f"{field}=N" for field in KeyLimits.__dataclass_fields__)
            raise ConfigError(f"after the key only {known} may follow")
        found[name] = int(value)
    return KeyLimits(**found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

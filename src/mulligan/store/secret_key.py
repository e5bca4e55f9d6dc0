"""The secret key of a state directory. It makes HMACs of values that no record may hold, and encrypts values that
Mulligan must read again.

The key is 32 random bytes in `secret.key`, mode 0600, created when it is first needed. A store without a directory
has a key while it is open. A person who copies the database without the key can neither read a sealed value nor test
guesses against an HMAC.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hmac import digest as hmac_digest
from typing import TYPE_CHECKING

from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.errors import fault_of_os_error

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_FILE = "secret.key"
KEY_BYTES = 32
_NONCE_BYTES = 12
_ASSOCIATED_DATA = b"mulligan.env.v1"


class SecretKey:
    def __init__(self, directory: str | None) -> None:
        self._path = None if directory is None else os.path.join(directory, KEY_FILE)
        self._key: bytes | None = None

    def hmac(self, purpose: str, *parts: bytes) -> str:
        """The HMAC-SHA256 of some bytes for one purpose. It covers the lengths: ("ab", "c") and ("a", "bc") differ."""
        message = b"".join(len(part).to_bytes(8, "big") + part for part in (purpose.encode(), *parts))
        return "hmac-sha256:" + hmac_digest(self._read_or_make(), message, "sha256").hex()

    def keyed_digest(self, digest: Digest) -> Digest:
        """A digest of the same content that only this store can compute: it can be compared, but guesses not tested."""
        return digest_from_raw(bytes.fromhex(self.hmac("content", raw_digest(digest)).partition(":")[2]))

    def seal(self, data: bytes) -> bytes:
        """Encrypted and authenticated: a nonce, then AES-256-GCM's output."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + _cipher(self._read_or_make()).encrypt(nonce, data, _ASSOCIATED_DATA)

    def unseal(self, sealed: bytes) -> bytes | None:
        """The plain bytes; None if the key is gone, or is another one than they were sealed with."""
        from cryptography.exceptions import InvalidTag

        key = self._read()
        if key is None:
            return None
        try:
            return _cipher(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _ASSOCIATED_DATA)
        except InvalidTag:
            return None

    def _read(self) -> bytes | None:
        """Read the file each time: when a user deletes the key, running processes must lose it too."""
        if self._path is None:
            return self._key
        try:
            with open(self._path, "rb") as file:
                key = file.read(KEY_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise fault_of_os_error(error, f"Reading {self._path}") from error
        return key if len(key) == KEY_BYTES else None

    def _read_or_make(self) -> bytes:
        key = self._read()
        if key is not None:
            return key
        if self._path is None:
            self._key = os.urandom(KEY_BYTES)
            return self._key
        try:
            _make(self._path)
        except OSError as error:
            raise fault_of_os_error(error, f"Writing {self._path}") from error
        return self._read_or_make()


def _make(path: str) -> None:
    """Create the file whole or not at all. If two processes create it at once, the first one's key stays."""
    draft = f"{path}.{os.urandom(8).hex()}.part"
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, os.urandom(KEY_BYTES))
        os.fsync(handle)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(handle)
        os.unlink(draft)


def _cipher(key: bytes) -> AESGCM:
    # Imported here, because only sessions with environment values need it.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(hmac_digest(key, b"seal", "sha256"))

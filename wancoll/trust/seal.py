"""The key file by which masters that share an etcd seal what they keep there: AES-256-GCM of `cryptography`.

What is sealed belongs to the name that it is kept under: what was moved to another name does not open, nor does what
was changed. Old content put back under its own name does open.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from wancoll.errors import ConfigError
from wancoll.trust.folder import read_secret

_KEY_BYTES, _NONCE_BYTES = 32, 12
_FILE = re.compile(rb"wancoll-seal-1 ([0-9a-f]{64})\n?")
_SEALED = re.compile(r"v1 ([0-9a-f]{16}) ([0-9A-Za-z+/]+=*)")


class Seal:
    """One key.

    Args:
        key: 32 bytes.
        path: of its file, for errors.

    Attributes:
        id: tells keys from each other; no secret.
    """

    def __init__(self, key: bytes, path: str) -> None:
        self._cipher, self.path = AESGCM(key), path
        self.id = hashlib.sha256(b"wancoll seal " + key).hexdigest()[:16]

    @classmethod
    def read(cls, path: str) -> Seal:
        """Read the seal from a file.

        Raises:
            FileNotFoundError: there is none.
            ConfigError: it is no such file, or others may read it.
        """
        hint = "chmod 600, and chown to the master's user; if others may have read it, begin anew with another"
        found = _FILE.fullmatch(read_secret(path, 100, what="a key file", hint=hint))
        if found is None:
            raise ConfigError(
                "is no key file", who=path, expected="one line, wancoll-seal-1 and 64 hex digits", got="something else",
                hint="copy the file of a master that runs, whole",
            )  # fmt: skip
        return cls(bytes.fromhex(found[1].decode()), path)

    @classmethod
    def make(cls, path: str) -> Seal:
        """A new one, in a file for this user alone, which is never written over another.

        Raises:
            FileExistsError: there is one by now.
            ConfigError: it cannot be written.
        """
        new = f"{path}.{secrets.token_hex(4)}.new"
        try:
            os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(b"wancoll-seal-1 %s\n" % secrets.token_hex(_KEY_BYTES).encode())
                file.flush()
                os.fsync(file.fileno())
            os.link(new, path)
        except FileExistsError:
            raise
        except OSError as bad:
            raise ConfigError("the key file cannot be written", who=path, got=bad.strerror or str(bad)) from bad
        finally:
            with contextlib.suppress(OSError):
                os.unlink(new)
        return cls.read(path)

    def close(self, name: str, text: str) -> str:
        """*text*, sealed, to be kept under *name*."""
        nonce = os.urandom(_NONCE_BYTES)
        data = nonce + self._cipher.encrypt(nonce, text.encode(), _bound(name))
        return f"v1 {self.id} {base64.b64encode(data).decode()}"

    def open(self, name: str, sealed: str) -> str:
        """What was sealed.

        Raises:
            ConfigError: by another key, or it was changed, or is none.
        """
        found = _SEALED.fullmatch(sealed)
        if found is None:
            raise _changed(name, "something else")
        if found[1] != self.id:
            raise ConfigError(
                "is not the key that etcd's content is sealed with", who=f"{self.path}, for {name}",
                expected=f"the key with id {found[1]}", got=f"one with id {self.id}",
                hint="copy the key file of a master that runs here",
            )  # fmt: skip
        try:
            data = base64.b64decode(found[2])
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _bound(name)).decode()
        except (InvalidTag, ValueError) as bad:
            raise _changed(name, "what does not open") from bad


def _bound(name: str) -> bytes:
    return b"wancoll " + name.encode()


def _changed(name: str, got: str) -> ConfigError:
    return ConfigError(
        "was changed by somebody who has not the masters' key", who=f"{name} in etcd", expected="what a master sealed",
        got=got, hint="see who can write to etcd. A spoilt token may be deleted there: who came with it needs another",
    )  # fmt: skip

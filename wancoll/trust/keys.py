"""Ed25519 keys, which are identities: a private key with its file, and the certificate that TLS wants around it.

A public key is 32 bytes. All is done by `cryptography`, which imports slowly: this module is imported where it is used.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from wancoll.errors import ConfigError
from wancoll.trust.folder import read_secret, write_secret

_MOST_BYTES = 4096  # of a key's file
_PEM_ENDS = b"-----END PRIVATE KEY-----\n"
_AGAIN = "put it back from a copy, or delete it, and start with a new token"
_ALWAYS = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)  # nobody looks at it


class Key:
    """A private key.

    Attributes:
        public: its public key, 32 bytes.
    """

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def new(cls) -> Key:
        """A random one."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: str) -> Key:
        """The key in a file.

        Raises:
            FileNotFoundError: there is none.
            ConfigError: it cannot be read, or others may read it.
        """
        return read_keys(path)[0]

    @classmethod
    def read_or_make(cls, path: str) -> Key:
        """The key in a file, which is made where there is none.

        Raises:
            OSError: it cannot be written.
            ConfigError: see read().
        """
        with contextlib.suppress(FileNotFoundError):
            return cls.read(path)
        made = cls.new()
        write_secret(path, made.pem)
        return made

    @property
    def pem(self) -> bytes:
        """PKCS #8, for this user alone."""
        form = serialization.PrivateFormat.PKCS8
        return self._private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

    def sign(self, data: bytes) -> bytes:
        """Its signature, 64 bytes."""
        return self._private.sign(data)

    def certificate(self) -> bytes:
        """A certificate (PEM) that holds the public key and says nothing more: TLS shows keys in no other form."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "wancoll")])
        made = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
        made = made.public_key(self._private.public_key()).not_valid_before(_ALWAYS[0]).not_valid_after(_ALWAYS[1])
        return made.sign(self._private, None).public_bytes(serialization.Encoding.PEM)


def keys_of(pem: bytes) -> list[Key]:
    """The keys that *pem* holds, at least one.

    Raises:
        ValueError: it holds something else, or a key has a password.
    """
    try:
        found = [serialization.load_pem_private_key(one + _PEM_ENDS, None) for one in pem.split(_PEM_ENDS)[:-1]]
    except (TypeError, UnsupportedAlgorithm) as bad:
        raise ValueError(str(bad)) from bad
    keys = [Key(one) for one in found if isinstance(one, Ed25519PrivateKey)]
    if not keys or len(keys) < len(found):
        raise ValueError("it holds no Ed25519 key, or others too")
    return keys


def read_keys(path: str) -> list[Key]:
    """The keys in a file.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it cannot be read, or others may read it.
    """
    found = read_secret(
        path, _MOST_BYTES, what="a key", hint="if nobody has read it, chmod 600; else delete it, and start with a new "
        "token", broken=_AGAIN,
    )  # fmt: skip
    try:
        return keys_of(found)
    except ValueError as bad:
        raise ConfigError(
            "cannot be used as key", who=path, expected="an Ed25519 key in PEM", got=str(bad), hint=_AGAIN
        ) from bad


def verify(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the owner of the key *public* has signed *data*."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def shown(certificate: bytes) -> bytes:
    """The public key in a *certificate* (DER, of anybody); b"": it holds no Ed25519 key, or cannot be read."""
    try:
        found = x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm):
        return b""
    return found.public_bytes_raw() if isinstance(found, Ed25519PublicKey) else b""

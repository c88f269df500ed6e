"""The certificate authority of a master, and the keys and requests of those who want a certificate of it.

All by `cryptography`. A certificate says each thing about its owner in a URI of its own among its other names:
wancoll:name/NAME, wancoll:role/ROLE, wancoll:group/GROUP for each group, wancoll:token/ID. The master's has the role
"master", which no token gives. Names are percent-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wancoll.errors import ConfigError
from wancoll.limits import CLOCKS_DIFFER
from wancoll.trust.identity import Identity
from wancoll.trust.papers import fingerprints, identity_of
from wancoll.trust.presented import hash_of_key, presented, whole

_AUTHORITY_DAYS = 3650
_MOST_REQUEST_BYTES = 4096
_VARIES = 64  # bytes by which certificates differ that say the same: serial numbers, times, signatures


def new_key() -> bytes:
    """A private key, PEM."""
    return _pem(ec.generate_private_key(ec.SECP256R1()))


def request(key: bytes) -> bytes:
    """A request for a certificate, PEM; it proves that its sender has the *key* (PEM), and says no more.

    Raises:
        ValueError: the key is none of new_key().
    """
    try:
        private = serialization.load_pem_private_key(key, None)
    except TypeError as bad:
        raise ValueError("the key has a password") from bad
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is of another kind")
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def times(certificate: bytes) -> tuple[float, float]:
    """When a certificate (PEM) of an Authority was made and when it ends, seconds since 1970.

    Raises:
        ValueError: it is none.
    """
    found = _read(certificate)
    return found.not_valid_before_utc.timestamp() + CLOCKS_DIFFER, found.not_valid_after_utc.timestamp()


def issuer_of(certificate: bytes, authorities: bytes) -> int | None:
    """Which of the *authorities* (PEM, counted from 0) has signed a certificate (PEM); None: none.

    Raises:
        ValueError: it is none, or they are none.
    """
    found = _read(certificate)
    for i, one in enumerate(whole(lambda: x509.load_pem_x509_certificates(authorities))):
        try:
            found.verify_directly_issued_by(one)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue
        return i
    return None


def owner(certificate: bytes) -> Identity | None:
    """The identity in a certificate (PEM), as identity_of() reads one that ssl has verified.

    Raises:
        ValueError: it is none.
    """
    return identity_of(presented(_read(certificate).public_bytes(serialization.Encoding.DER)))


def _read(certificate: bytes) -> x509.Certificate:
    return whole(lambda: x509.load_pem_x509_certificate(certificate))


@dataclass(frozen=True, slots=True)
class Request:
    """What a request (PEM) holds, after its signature was checked."""

    key: ec.EllipticCurvePublicKey
    hashed: str  # of the key

    @classmethod
    def read(cls, pem: bytes) -> Request:
        """From PEM.

        Raises:
            ConfigError: it is none, or not signed by its own key.
        """
        try:
            if len(pem) > _MOST_REQUEST_BYTES:
                raise ValueError(f"{len(pem)} bytes")
            found = x509.load_pem_x509_csr(pem)
            key = found.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
                raise ValueError("another kind of key")
            if not found.is_signature_valid:
                raise ValueError("its signature is wrong")
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as bad:
            raise ConfigError(
                "the request for a certificate cannot be used",
                expected="one for a P-256 key, signed by it",
                got=str(bad),
            ) from bad
        return cls(key, hash_of_key(key).hex())


class Authority:
    """The certificate authority of a master.

    Args:
        key: PEM.
        certificate: PEM.

    Raises:
        ValueError: they are none, or do not belong together.
    """

    def __init__(self, key: bytes, certificate: bytes) -> None:
        private = serialization.load_pem_private_key(key, None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError("the authority's key is of another kind")
        self._key, self._certificate = private, x509.load_pem_x509_certificate(certificate)
        if self._certificate.public_key() != private.public_key():
            raise ValueError("the authority's key is not that of its certificate")
        self.certificate = certificate
        [self.fingerprint] = fingerprints(certificate)

    @classmethod
    def make(cls, now: float) -> Authority:
        """A new one; *now*: seconds since 1970."""
        key = ec.generate_private_key(ec.SECP256R1())
        serial = x509.random_serial_number()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"wancoll authority {serial:x}"[:30])])
        made = _builder(key.public_key(), name, name, serial, now, _AUTHORITY_DAYS * 86400.0)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        made = made.add_extension(_usage(signs=True), critical=True)
        return cls(_pem(key), made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    @property
    def key(self) -> bytes:
        """PEM, for whoever keeps it; nobody else."""
        return _pem(self._key)

    def sign(self, wanted: Request, owner: Identity, now: float, lifetime: float) -> bytes:
        """A certificate (PEM) that says who the *owner* is, for daemons to dial with and to be dialled.

        Args:
            wanted: whose key it is for.
            owner: who has that key.
            now: seconds since 1970.
            lifetime: seconds.
        """
        uris = [f"name/{quote(owner.name, safe='')}", f"role/{owner.role}"]
        uris += [f"group/{quote(one, safe='')}" for one in owner.groups]
        uris += [f"token/{owner.token}"] * bool(owner.token)
        return self._sign(wanted.key, uris, now, lifetime)

    def size(self, owner: Identity) -> int:
        """Bytes of a certificate (PEM) that says so, at most."""
        return len(self.sign(Request(self._key.public_key(), ""), owner, 0.0, 1.0)) + _VARIES

    def sign_master(self, wanted: Request, now: float, lifetime: float) -> bytes:
        """The same for the master itself."""
        return self._sign(wanted.key, ["role/master"], now, lifetime)

    def _sign(self, key: Any, uris: list[str], now: float, lifetime: float) -> bytes:
        issuer, serial = self._certificate.subject, x509.random_serial_number()
        made = _builder(key, x509.Name([]), issuer, serial, now, lifetime)
        names = [x509.UniformResourceIdentifier(f"wancoll:{one}") for one in uris]
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=True)  # no other name
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        made = made.add_extension(_usage(signs=False), critical=True)
        both = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        made = made.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = made.add_extension(authority, critical=False)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, serial: int, now: float, lifetime: float
) -> x509.CertificateBuilder:
    at = datetime.fromtimestamp(int(now), UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key).serial_number(serial)
    builder = builder.not_valid_before(at - timedelta(seconds=CLOCKS_DIFFER)).not_valid_after(
        at + timedelta(seconds=max(1.0, lifetime))
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs, crl_sign=signs, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

"""A certificate that was shown as DER, in the form in which `ssl` tells of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

_Found = TypeVar("_Found")
_SUBJECT = {NameOID.COMMON_NAME: "commonName", NameOID.ORGANIZATIONAL_UNIT_NAME: "organizationalUnitName"}


def whole(read: Callable[[], _Found]) -> _Found:
    """What *read* finds in a certificate, or ValueError, whatever is wrong there: anybody may have made it."""
    try:
        return read()
    except (x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm) as bad:
        raise ValueError(str(bad)) from bad


def key_of(der: bytes) -> bytes:
    """SHA-256 of the public key that it is for.

    Raises:
        ValueError: it is no certificate, or one that cannot be read.
    """
    return whole(lambda: hash_of_key(x509.load_der_x509_certificate(der).public_key()))


def hash_of_key(key: Any) -> bytes:
    """SHA-256 of a public key of `cryptography`."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize()


def presented(der: bytes) -> Mapping[str, Any]:
    """What identities are made of: its subject's names and its other ones.

    Raises:
        ValueError: it is no certificate, or one that cannot be read.
    """
    return whole(lambda: _presented(der))


def _presented(der: bytes) -> Mapping[str, Any]:
    found = x509.load_der_x509_certificate(der)
    subject = tuple(((_SUBJECT[one.oid], one.value),) for one in found.subject if one.oid in _SUBJECT)
    try:
        others = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return {"subject": subject, "subjectAltName": ()}
    names = [("URI", one) for one in others.get_values_for_type(x509.UniformResourceIdentifier)]
    names += [("DNS", one) for one in others.get_values_for_type(x509.DNSName)]
    return {"subject": subject, "subjectAltName": tuple(names)}

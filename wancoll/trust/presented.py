"""A certificate that was shown as DER, in the form in which `ssl` tells of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

_SUBJECT = {NameOID.COMMON_NAME: "commonName", NameOID.ORGANIZATIONAL_UNIT_NAME: "organizationalUnitName"}


def key_of(der: bytes) -> bytes:
    """SHA-256 of the public key that it is for.

    Raises:
        ValueError: it is no certificate.
    """
    return hash_of_key(x509.load_der_x509_certificate(der).public_key())


def hash_of_key(key: Any) -> bytes:
    """SHA-256 of a public key of `cryptography`."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize()


def presented(der: bytes) -> Mapping[str, Any]:
    """What identities are made of: its subject's names and its other ones.

    Raises:
        ValueError: it is no certificate.
    """
    found = x509.load_der_x509_certificate(der)
    subject = tuple(((_SUBJECT[one.oid], one.value),) for one in found.subject if one.oid in _SUBJECT)
    try:
        others = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return {"subject": subject, "subjectAltName": ()}
    names = [("URI", one) for one in others.get_values_for_type(x509.UniformResourceIdentifier)]
    names += [("DNS", one) for one in others.get_values_for_type(x509.DNSName)]
    return {"subject": subject, "subjectAltName": tuple(names)}

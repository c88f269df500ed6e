"""One end's papers, its key, its certificate and the authorities that it believes, as files; and TLS 1.3 by them."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from wancoll.errors import ConfigError
from wancoll.local import open_to_others, standing
from wancoll.trust.identity import Identity, Role

LIFETIME = 24 * 3600.0  # seconds, of a certificate, unless the master is told otherwise
# Files of a master's folder: certificates of all authorities that are believed, that which signs first; NAME.pem with
# NAME's key; all authorities with their keys.
AUTHORITY, ADMIN = "authority.pem", "admin"
AUTHORITY_KEY = "authority.key"
MASTER = "master.pem"  # in its folder, too: its own certificate
_LOCK = "lock"
# OpenSSL's SSL_OP_NO_TX_ and NO_RX_CERTIFICATE_COMPRESSION (RFC 8879), from 3.2 on; the ssl module has no names for
# them. Older versions cannot compress, and have no use for these bits.
_UNCOMPRESSED = 1 << 32 | 1 << 33
_AGAIN = 0.02  # seconds until a lock is tried again
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")
_ROLES: tuple[Role, ...] = ("peer", "observer", "chaos", "admin")


@dataclass(frozen=True, slots=True)
class Papers:
    """One end's key, certificate and believed authorities, as paths of PEM files.

    Attributes:
        authorities: certificates of whom this end believes.
        certificate: its own, and any between it and the authority; "": it has none.
        key: of that.
        by_host: the master is known by its host name, as with certificates of one's own, not by its role.
    """

    authorities: str
    certificate: str = ""
    key: str = ""
    by_host: bool = False

    def to_dial(self) -> ssl.SSLContext:
        """For who dials the master.

        Raises:
            ConfigError: the files cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.by_host
        return self._fill(context)

    def to_listen(self) -> ssl.SSLContext:
        """For the master. Who connects may have a certificate: one that is wrong is refused in the handshake.

        Raises:
            ConfigError: the files cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.num_tickets = 0  # each connection proves anew who is there
        return self._fill(context)

    def asks_for(self, host: str) -> str:
        """What to call the master at *host* in the handshake: by this it shows a certificate that is believed here."""
        with contextlib.suppress(OSError):
            if not self.by_host:
                with open(self.authorities, "rb") as file:
                    return next(map(server_name, fingerprints(file.read())), host)
        return host

    def _fill(self, context: ssl.SSLContext) -> ssl.SSLContext:
        _only_new(context)
        try:
            context.load_verify_locations(self.authorities)
            if self.certificate:
                with open(self.certificate, "rb") as file:  # for the key OpenSSL opens it again: another may be there
                    same = f"/proc/self/fd/{file.fileno()}"
                    context.load_cert_chain(same, self.key or None, password=no_password)
        except (OSError, ValueError) as bad:  # SSLError is an OSError
            raise ConfigError(
                "certificates cannot be used", who=f"{self.certificate}, {self.key}, {self.authorities}",
                expected="PEM files: a certificate, its key without a password, and authorities",
                got=str(bad) or type(bad).__name__, hint="see that they belong together and can be read",
            ) from bad  # fmt: skip
        return context

    def is_master(self, certificate: Mapping[str, Any]) -> bool:
        """Whether the verified *certificate* (as ssl tells it) is a master's. By host name ssl has looked already."""
        return self.by_host or "role/master" in _facts(certificate)


@contextlib.contextmanager
def in_memory(data: bytes) -> Iterator[str]:
    """The path, for as long, of a file with this *data* that is on no disk: `ssl` takes certificates from files."""
    with open(os.memfd_create("wancoll-papers"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def unverified() -> ssl.SSLContext:
    """To fetch an authority whose hash is known: believes anybody, so nothing else may be said over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _only_new(context)
    return context


def _only_new(context: ssl.SSLContext) -> None:
    """TLS 1.3, and of its groups one that costs little: one message with ffdhe8192 would take a tenth of a second.

    No compressed certificates: a few kilobytes of them are megabytes, past all bounds on a handshake's bytes.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_ecdh_curve("prime256v1")  # it takes one; all have this one
    context.options |= _UNCOMPRESSED


def fingerprints(certificates: bytes) -> list[str]:
    """SHA-256 of each certificate of a PEM text, in hex. They may be anybody's: nothing in them is looked at.

    Raises:
        ValueError: they are none.
    """
    return [hashlib.sha256(one).hexdigest() for one in _ders(certificates)]


def named(certificates: bytes, fingerprint: str) -> bytes:
    """Return the one of *certificates* (PEM, anybody's) that has this SHA-256 (hex), as PEM; b"" if none has.

    Raises:
        ValueError: they are none.
    """
    found = (one for one in _ders(certificates) if hashlib.sha256(one).hexdigest() == fingerprint)
    return next((ssl.DER_cert_to_PEM_cert(one).encode() for one in found), b"")


def _ders(certificates: bytes) -> list[bytes]:
    return [base64.b64decode(b"".join(one.split())) for one in _CERTIFICATE.findall(certificates)]


def server_name(fingerprint: str) -> str:
    """By which who dials asks for a certificate of the authority with this SHA-256."""
    return f"{fingerprint[:32]}.wancoll"


def identity_of(certificate: Mapping[str, Any]) -> Identity | None:
    """The identity in a verified *certificate*, as ssl's getpeercert() tells it. None: it names nobody.

    One that an Authority has not made is of a peer that may join any group, by its first DNS name or else its common
    name; an organisational unit "observer", "chaos" or "admin" gives it that role.
    """
    facts = _facts(certificate)
    if facts:
        names = [unquote(one.removeprefix("name/")) for one in facts if one.startswith("name/")]
        roles = [role for role in _ROLES if f"role/{role}" in facts]
        if len(names) != 1 or len(roles) != 1:
            return None
        groups = tuple(unquote(one.removeprefix("group/")) for one in facts if one.startswith("group/"))
        token = next((one.removeprefix("token/") for one in facts if one.startswith("token/")), "")
        return Identity(names[0], roles[0], groups, token)
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    names += [value for kind, value in subject if kind == "commonName"]
    units = [value for kind, value in subject if kind == "organizationalUnitName"]
    role: Role = next((role for role in _ROLES if role in units), "peer")
    return Identity(names[0], role) if names else None


def own_folder(path: str) -> None:
    """A folder for keys: made, where there is none; nobody else may put others in their place.

    Raises:
        ConfigError: others may write to it.
        OSError: it cannot be made.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.stat(path)
    if open_to_others(found):
        raise ConfigError(
            "is a folder in which others may replace the keys", who=f"--state {path}",
            expected=f"one of user {os.geteuid()} or root, that nobody else may write to",
            got=standing(found),
            hint="choose another, or, if all in it is yours, make it so: chown, chmod 700",
        )  # fmt: skip


@contextlib.contextmanager
def held_folder(path: str, whose: str, owner: str, wait: float = 0.0) -> Iterator[None]:
    """A folder for keys that is one *whose*, "daemon" or "master", for as long; *owner* says which to another one.

    Raises:
        ConfigError: another one has it for *wait* seconds, or others may write to it.
        OSError: it cannot be made, or written to.
    """
    own_folder(path)
    lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    ends = time.monotonic() + wait
    try:
        while not _locked(lock):
            if time.monotonic() >= ends:
                other = os.pread(lock, 1000, 0).decode(errors="replace") or "one that starts"
                raise ConfigError(
                    f"is the state folder of another {whose}, which runs", who=path, got=other,
                    expected=f"one of this {whose}'s own",
                    hint=f"give each {whose} its own --state (or WANCOLL_STATE), or none",
                )  # fmt: skip
            time.sleep(_AGAIN)
        os.ftruncate(lock, 0)
        os.write(lock, owner.encode())
        yield
    finally:
        os.close(lock)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_secret(path: str, data: bytes) -> None:
    """A file for this user alone, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # what was there may be open elsewhere, or a link
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as bad:
        bad.filename = new  # a full disk's error names none
        raise
    os.replace(new, path)


def _facts(certificate: Mapping[str, Any]) -> list[str]:
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    return [one.removeprefix("wancoll:") for one in uris if one.startswith("wancoll:")]


def no_password() -> str:
    """For load_cert_chain: nobody is there who could type one.

    Raises:
        ValueError: always.
    """
    raise ValueError("the key has a password")

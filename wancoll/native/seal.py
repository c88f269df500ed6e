"""The typed face of native/'s TLS 1.3: the key that an end shows, and one connection until the engine takes it.

OpenSSL 3 of the system is loaded when it is first wanted; without it all else works.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Literal

from wancoll.errors import ConfigError
from wancoll.native import ffi, lib

if TYPE_CHECKING:
    from wancoll import _native as c

READS, WRITES = 1, 2
_KEY_BYTES = 32
_REASON_BYTES = 240


def check_possible() -> None:
    """Raise ConfigError where there is no OpenSSL 3."""
    reason = ffi.new("char[]", _REASON_BYTES)
    if not lib.wc_tls_identity_new(b"", b"", reason, _REASON_BYTES) and ffi.errno == errno.ENOSYS:
        raise _impossible(ffi.string(reason).decode(errors="replace"))


def _impossible(why: str) -> ConfigError:
    return ConfigError(
        "encryption is not possible on this machine", who="this daemon",
        expected="OpenSSL 3: libssl.so.3 and libcrypto.so.3", got=why,
        hint="install it (libssl3, openssl-libs), or run without --join",
    )  # fmt: skip


class Seals:
    """What this end shows of itself where it accepts. Any number of connections may be made of it.

    Args:
        certificate: an envelope of its public key, PEM.
        key: the private key, PEM, without a password.

    Raises:
        ConfigError: they cannot be used, or there is no OpenSSL 3.
    """

    def __init__(self, certificate: bytes, key: bytes) -> None:
        self._seals: c.Pointer | None = None
        reason = ffi.new("char[]", _REASON_BYTES)
        made = lib.wc_tls_identity_new(certificate, key, reason, _REASON_BYTES)
        if not made:
            code, text = ffi.errno, ffi.string(reason).decode(errors="replace")
            if code == errno.ENOSYS:
                raise _impossible(text)
            if code == errno.ENOMEM:
                raise MemoryError(text)
            raise ConfigError(
                "the key cannot be used for lanes", who="this daemon",
                expected="PEM texts of a certificate and of its key", got=text,
            )  # fmt: skip
        self._seals = made

    def __del__(self) -> None:
        if self._seals is not None:
            lib.wc_tls_identity_free(self._seals)

    def begin(self, fd: int, *, accepts: bool) -> Sealed:
        """One end of a connection on the non-blocking socket *fd*, which stays the caller's."""
        assert self._seals is not None
        made = lib.wc_tls_new(self._seals, fd, int(accepts))
        if not made:
            raise MemoryError("no memory for a sealed connection")
        return Sealed(made)


class Sealed:
    """A connection, before the engine has it. Made by Seals."""

    def __init__(self, tls: c.Pointer) -> None:
        self._tls: c.Pointer | None = tls

    @property
    def _live(self) -> c.Pointer:
        if self._tls is None:
            raise OSError(errno.EBADF, "it is closed, or the engine's")
        return self._tls

    def handshake(self) -> Literal[0, 1, 2]:
        """Go on with it. 0: it is through; READS or WRITES: call again when the socket can be read, or written.

        Who dials learns with what it reads first whether the other end takes it.

        Raises:
            OSError: it has failed.
        """
        done = lib.wc_tls_handshake(self._live)
        if done < 0:
            raise self._failure()
        return 0 if done == 0 else 1 if done == READS else 2

    def key(self) -> bytes:
        """The public key that the acceptor has shown, and proved to have: 32 bytes.

        Raises:
            OSError: it has shown a key of another kind, or this end is the acceptor.
        """
        out = ffi.new("uint8_t[]", _KEY_BYTES)
        if lib.wc_tls_key(self._live, out) < 0:
            raise OSError(errno.EPROTO, "it has shown no Ed25519 key: does it run the same version of wancoll?")
        return bytes(ffi.buffer(out, _KEY_BYTES))

    def read(self, most: int) -> bytes | None:
        """Some bytes; b"" at the end; None: none are there yet. Raises OSError: it has failed."""
        room = ffi.new("uint8_t[]", most)
        got = lib.wc_tls_read(self._live, room, most)
        if got >= 0:
            return bytes(ffi.buffer(room, got))
        if ffi.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            return None
        raise self._failure()

    def write(self, data: bytes) -> int:
        """How many bytes were taken, perhaps none. Raises OSError: it has failed."""
        taken = lib.wc_tls_write(self._live, data, len(data))
        if taken >= 0:
            return taken
        if ffi.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            return 0
        raise self._failure()

    def flush(self) -> bool:
        """Whether all that was taken has left. Raises OSError: it has failed."""
        done = lib.wc_tls_flush(self._live)
        if done < 0:
            raise self._failure()
        return done == 1

    def hand_over(self) -> c.Pointer:
        """For the engine, whose it is from here on."""
        tls, self._tls = self._live, None
        return tls

    def close(self) -> None:
        """Forget it; its socket is another's. Idempotent."""
        if self._tls is not None:
            lib.wc_tls_free(self._tls)
            self._tls = None

    __del__ = close

    def _failure(self) -> OSError:
        code = ffi.errno
        reason = ffi.string(lib.wc_tls_reason(self._live)).decode(errors="replace")
        return OSError(code, reason or os.strerror(code))

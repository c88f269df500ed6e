"""TLS of one connection as bytes in and bytes out: it knows no socket and never waits.

trio's SSLStream has to wait to send, and our sends never do; this is the same OpenSSL in memory. Nothing that was
opened stays inside, so what a socket has to say is all that there is to wait for, but while there is `more`.

OpenSSL is given one record at a time, so that whoever connects costs little: a call opens few records, and few in all
may hold no data. New keys above all take far longer to open than to send, and no end of a control connection sends any.
A handshake has few bytes, too: one certificate of theirs may be made to take a tenth of a second to read. So a step of
it may be taken in a thread (`Stream.shake_hands`); all else is for the task that has the connection.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
import sys
from collections.abc import Mapping
from typing import Any

_HEADER = 5  # bytes before each record; the last two say how many follow
_PIECE = 16 * 1024  # more than a record holds is never read at once
_AT_ONCE = 64  # records that one call opens: then it is others' turn
_SHAKING = 32  # records that a handshake is at most; one with long certificates takes twelve
_SHAKING_BYTES = 16 * 1024  # and these; a token for 64 groups takes most. engine/streams/tls.c has the same
_BARREN = 8  # records after it that may hold no data
_PLAIN = "it does not speak TLS: either it was started without certificates, or this is no port of wancoll's"
_OTHER = (
    "its certificate is of another authority than that of the token or of --ca; where that was replaced, join with a "
    "new token"
)
_PURPOSE = "is for other purposes: where it lists extended key usages it needs serverAuth and clientAuth"
_LONG = "its handshake goes on and on"
_UNKNOWN = (2, 18, 19, 20)  # OpenSSL's codes for the same
_WHY = {  # of OpenSSL's words, what there is to do
    "certificate expired": "the certificate shown has expired: look at the clocks of both machines, and join again",
    "certificate has expired": "its certificate has expired: look at the clocks of both machines",
    "certificate is not yet valid": "its certificate is not valid yet: look at the clocks of both machines",
    "bad certificate": "the certificate shown is refused, as a rule since it is not valid yet there: look at the "
    "clocks of both machines",
    "certificate required": "a certificate is needed: join with a token",
    "unknown ca": "the certificate shown is of another authority: join with a token of this one",
    "unable to get local issuer": _OTHER,
    "self-signed": _OTHER,
    "unsupported certificate purpose": "its certificate " + _PURPOSE,
    "unsupported certificate": "the certificate shown " + _PURPOSE,
    "unsuitable certificate purpose": "its certificate " + _PURPOSE,  # of newer versions
    "wrong version number": _PLAIN,
    "record layer failure": _PLAIN,
    "http request": _PLAIN,
    "callback failed": "the name that it asks for is no host's name",
    "no suitable key share": "it offers no group for the key exchange that is taken here: P-256 would do",
    "unsupported protocol": "it speaks an older TLS than 1.3",
}


class TlsFailed(Exception):
    """The other end is not who it should be, or does not speak TLS: an event, with the reason.

    Attributes:
        unknown: its certificate is of an authority that is not believed here.
    """

    def __init__(self, reason: str, *, unknown: bool = False) -> None:
        super().__init__(reason)
        self.unknown = unknown


class Tls:
    """TLS of one connection: bytes in, bytes out.

    Args:
        context: of this end.
        listens: this end was connected to.
        host: that was dialled.

    Raises:
        TlsFailed: *host* can be nobody's name.
    """

    def __init__(self, context: ssl.SSLContext, *, listens: bool, host: str = "") -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            self._object = context.wrap_bio(
                self._in, self._out, server_side=listens, server_hostname=None if listens else host
            )
        except (ValueError, TypeError) as bad:
            raise TlsFailed(f"{host[:100]!r} is no host's name ({bad})") from bad
        self.listens = listens
        self.done = False  # the handshake
        self.over = False  # the other end has said goodbye: nothing else that it sends is looked at
        self._first = b""  # that came
        self._came = bytearray()  # and OpenSSL has not been given yet
        self._left = 0  # bytes that belong to the record of which it has the beginning
        self._given = 0  # bytes, to OpenSSL
        self._spare = _SHAKING  # so many records more may hold no data

    def shake(self, data: bytes) -> None:
        """Take what came, during the handshake.

        Raises:
            TlsFailed: it is over.
        """
        self._first = self._first or data[:2]
        self._came += data
        try:
            while not self._shaken():
                if not self._give():
                    return
                self._count()
        except (ssl.SSLError, ValueError) as bad:
            unknown = isinstance(bad, ssl.SSLCertVerificationError) and bad.verify_code in _UNKNOWN
            raise TlsFailed(explained(bad), unknown=unknown) from bad
        self.done, self._spare = True, _BARREN

    def _shaken(self) -> bool:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _give(self) -> bool:
        """Give OpenSSL what has come of one record. False: nothing has."""
        if not self._left and len(self._came) >= _HEADER:
            self._left = _HEADER + int.from_bytes(self._came[_HEADER - 2 : _HEADER], "big")
        piece = self._came[: self._left]
        del self._came[: self._left]
        self._left -= len(piece)
        self._in.write(piece)
        self._given += len(piece)
        return bool(piece)

    def _count(self) -> None:
        """What it was given last was no data."""
        self._spare -= not self._left  # a whole record
        if self._spare < 0 or not (self.done or self._given <= _SHAKING_BYTES):
            raise TlsFailed("it sends records without data again and again" if self.done else _LONG)

    @property
    def plain(self) -> bool:
        """Whether the other end has begun as one of wancoll's that does not speak TLS: with a short frame."""
        return not self.done and self._first[:1] == b"\0"

    def seal(self, data: bytes) -> bytes:
        """What to send for *data*; nothing before the handshake is done."""
        if not self.done:  # a thread may be at it
            return b""
        with contextlib.suppress(ssl.SSLError):  # it has failed: the reader finds out
            self._object.write(data)
        return self.outgoing()

    def open(self, data: bytes) -> bytes:
        """What the other end said, as far as it is there, or until there is `more`. To be answered is outgoing().

        Raises:
            TlsFailed: it was changed on the way, or the other end refuses this one.
        """
        self._came += data
        found = []
        try:
            for _ in range(_AT_ONCE):
                if self.over or not self._give():
                    break
                try:
                    found.append(self._object.read(_PIECE))
                    self.over = not found[-1]
                except ssl.SSLWantReadError:
                    self._count()
        except ssl.SSLZeroReturnError:  # after a goodbye of this end's
            self.over = True
        except ssl.SSLError as bad:
            raise TlsFailed(explained(bad)) from bad
        if self.over:
            self._came.clear()
        return b"".join(found)

    @property
    def more(self) -> bool:
        """Whether open(b"") has something to open: it comes before what the socket has."""
        return len(self._came) >= (1 if self._left else _HEADER)

    def outgoing(self) -> bytes:
        """What is to be sent."""
        return self._out.read()

    def goodbye(self) -> bytes:
        """What to send as the last of all."""
        with contextlib.suppress(ssl.SSLError):
            self._object.unwrap()
        return self.outgoing()

    def certificate(self) -> Mapping[str, Any]:
        """The other end's, verified; empty: it has shown none, or nobody has looked."""
        return self._object.getpeercert() or {}

    def shown(self) -> bytes:
        """The same as DER; empty likewise."""
        return self._object.getpeercert(binary_form=True) or b""


@functools.cache
def ignore_strange_names() -> None:
    """Let CPython write no traceback of a name that is no ASCII, in this process and for good.

    It writes one for each such name that a context with an sni_callback is asked for, and strangers send them.
    """
    hook = sys.unraisablehook

    def heard(unraisable: Any) -> None:
        if not (isinstance(unraisable.exc_value, UnicodeDecodeError) and isinstance(unraisable.object, bytes)):
            hook(unraisable)

    sys.unraisablehook = heard


def explained(bad: Exception | str, first: Mapping[str, str] = {}) -> str:
    """What went wrong, in words that say what to do, with OpenSSL's. *first*: words that count before those of _WHY."""
    text = str(bad)
    said = text.lower().replace("_", " ")
    known = [*first.items(), *_WHY.items()]
    return next((f"{words} ({text})" for found, words in known if found in said), text)

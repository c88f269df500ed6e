"""TLS of one connection as bytes in and bytes out: it knows no socket and never waits.

trio's SSLStream has to wait to send, and our sends never do; this is the same OpenSSL in memory. Nothing that was
opened stays inside, so what a socket has to say is all that there is to wait for, but while there is `more`.

OpenSSL is given one record at a time, so that whoever connects costs little (docs/security.md): a call opens few
records, and few in all may hold no data.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wancoll.limits import PROTOCOL_VERSION
from wancoll.trust.folder import in_memory

if TYPE_CHECKING:
    from wancoll.trust.keys import Key

_HEADER = 5  # bytes before each record; the last two say how many follow
_PIECE = 16 * 1024  # more than a record holds is never read at once
_AT_ONCE = 64  # records that one call opens: then it is others' turn
_SHAKING = 16  # records that a handshake is at most
_SHOWN_BYTES = 1536  # and these where this end has dialled: a certificate of 1 KiB, and what comes with it
_OFFERED_BYTES = 4096  # where it listens: what a dialler offers, which costs nothing to read
_BARREN = 8  # records after it that may hold no data
_SPEAKS = f"wancoll/{PROTOCOL_VERSION}"  # by ALPN: an end of another version hears so in words that it can read
# OpenSSL's SSL_OP_NO_TX_ and NO_RX_CERTIFICATE_COMPRESSION (RFC 8879), from 3.2 on; the ssl module has no names for
# them. Older versions cannot compress, and have no use for these bits. 3.5 KB of compressed ones took 16 s to read.
_UNCOMPRESSED = 1 << 32 | 1 << 33
_PLAIN = "it does not speak TLS: either it was started in clear, or this is no port of wancoll's"
_LONG = "its handshake goes on and on"
_WHY = {  # of OpenSSL's words, what there is to do
    "certificate required": "it wants a certificate: does it run the same version of wancoll?",
    "wrong version number": _PLAIN,
    "record layer failure": _PLAIN,
    "http request": _PLAIN,
    "callback failed": "the name that it asks for is no host's name",
    "no suitable key share": "it offers no group for the key exchange that is taken here: P-256 would do",
    "unsupported protocol": "it speaks an older TLS than 1.3",
}
# After the handshake OpenSSL 3.2 and later say of a changed record only that.
_CHANGED = {"record layer failure": "decryption failed or bad record mac: what it sent was changed on the way"}


class TlsFailed(Exception):
    """The other end is not who it should be, or does not speak TLS: an event, with the reason."""


class WrongKey(TlsFailed):
    """The acceptor has proved a key that the dialler does not expect, or none."""


def to_dial() -> ssl.SSLContext:
    """For a dialler. It believes anybody: its user compares the key that is `shown` before it says anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return _only_new(context)


class Listening:
    """The keys that an acceptor shows: the first one, or that which a dialler asks for by server_name()."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = {_to_listen(key): key.public for key in keys}
        self.context, *others = self.keys
        if others:
            _ignore_strange_names()
            by_name = {server_name(key): context for context, key in self.keys.items()}

            def choose(connection: ssl.SSLObject, asked: str | None, _: ssl.SSLContext) -> None:
                connection.context = by_name.get(asked or "", self.context)

            self.context.sni_callback = choose


def _to_listen(key: Key) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # each connection proves anew who is there
    with in_memory(key.certificate() + key.pem) as file:
        context.load_cert_chain(file)
    return _only_new(context)


def _only_new(context: ssl.SSLContext) -> ssl.SSLContext:
    """TLS 1.3, and of its groups one that costs little: one message with ffdhe8192 would take a tenth of a second."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_ecdh_curve("prime256v1")  # it takes one; all have this one, machines with rules of their own, too
    context.set_alpn_protocols([_SPEAKS])
    context.options |= _UNCOMPRESSED | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    return context


def server_name(key: bytes) -> str:
    """By which a dialler asks for the public *key* that it expects."""
    return f"{key.hex()[:32]}.wancoll"


class Tls:
    """TLS of one connection: bytes in, bytes out.

    Args:
        listening: of an acceptor; None: this end has dialled.
        expects: public keys of which the other end, dialled, has to show one; it is asked for the last one.
    """

    def __init__(self, listening: Listening | None = None, *, expects: Sequence[bytes] = ()) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._listening, self._expects = listening, expects
        context = listening.context if listening is not None else to_dial()
        self._object = context.wrap_bio(
            self._in, self._out, server_side=listening is not None,
            server_hostname=None if listening is not None else server_name(expects[-1]),
        )  # fmt: skip
        self.listens = listening is not None
        self._most = _OFFERED_BYTES if self.listens else _SHOWN_BYTES
        self.key = b""  # public, of the acceptor, once the handshake is done
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
            TlsFailed: it is over, or the acceptor is not the one that was expected.
        """
        self._first = self._first or data[:2]
        self._came += data
        try:
            while not self._shaken():
                if not self._give():
                    return
                self._count()
        except (ssl.SSLError, ValueError) as bad:
            raise TlsFailed(explained(bad)) from bad
        self.key = self._acceptor()
        self.done, self._spare = True, _BARREN

    def _acceptor(self) -> bytes:
        if self._listening is not None:
            return self._listening.keys[self._object.context]
        from wancoll.trust.keys import shown

        key = shown(self._object.getpeercert(binary_form=True) or b"")
        if key not in self._expects:
            raise WrongKey(
                f"it has {f'the key {key.hex()}' if key else 'no key of this version of wancoll'}, and not "
                f"{' or '.join(one.hex() for one in self._expects)}: somebody else answers there, or it was replaced"
            )
        return key

    @property
    def speaks(self) -> bool:
        """Whether the other end is of this version of the protocol."""
        return self._object.selected_alpn_protocol() == _SPEAKS

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
        if self._spare < 0 or not (self.done or self._given <= self._most):
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
            raise TlsFailed(explained(bad, _CHANGED)) from bad
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


@functools.cache
def _ignore_strange_names() -> None:
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

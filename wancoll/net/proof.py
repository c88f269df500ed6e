"""The proof of a key: what a dialler signs, what an acceptor checks, and receipts, by which masters vouch for keys.

TLS proves the acceptor's key. Then the dialler signs the acceptor's challenge. docs/protocol.md shows all fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from wancoll.errors import ProtocolError
from wancoll.trust.identity import Identity
from wancoll.wire import messages as m
from wancoll.wire.framing import decode_body, encode_body

if TYPE_CHECKING:
    from wancoll.trust.keys import Key

Purpose = Literal["control", "admin", "lane", "probe", "relay"]
NONCE_BYTES = 32
_VERSION = b"wancoll-1"
_PURPOSES: dict[type, Purpose] = {
    m.LaneHello: "lane",
    m.ProbeHello: "probe",
    m.Hello: "control",
    m.AskElection: "control",
    m.AtRelay: "relay",
}  # all else that is said first is for the master, by a command: "admin"


def purpose_of(message: object) -> Purpose:
    """The purpose of a connection that begins with *message*."""
    return _PURPOSES.get(type(message), "admin")


@dataclass(frozen=True, slots=True)
class Proof:
    """What a dialler proves itself with.

    Attributes:
        key: its own.
        acceptors: public keys of which the acceptor has to prove one, the newest last.
        receipt: of a master for this key; b"": there is none.
        name: that a newcomer wants to be admitted by.
        token: "id.secret", for a newcomer to be admitted; "" where the acceptor is no master.
    """

    key: Key
    acceptors: tuple[bytes, ...]
    receipt: bytes = b""
    name: str = ""
    token: str = ""

    def first(self, acceptor: bytes, nonce: bytes, message: msgspec.Struct) -> m.Signed:
        """What to send first in place of *message*, to the owner of the key *acceptor*, for its challenge's *nonce*."""
        unsigned = m.Signed(self.key.public, bytes(64), encode_body(message), self.receipt, self.name, self.token)
        text = _text(unsigned, acceptor, nonce, purpose_of(message))
        return msgspec.structs.replace(unsigned, signature=self.key.sign(text))


def check_first(first: m.Signed, acceptor: bytes, nonce: bytes, kind: Any, *, who: str = "") -> Any:
    """The message of type *kind* that *first* holds, said by the owner of *first.key* and to this acceptor alone.

    Args:
        first: what came.
        acceptor: the public key that this end has shown.
        nonce: of its challenge.
        kind: message types that may come first.
        who: sends it, for errors.

    Raises:
        ProtocolError: it holds no such message, or is not signed so.
    """
    from wancoll.trust.keys import verify

    message = decode_body(first.body, kind, who=who)
    if not verify(first.key, first.signature, _text(first, acceptor, nonce, purpose_of(message))):
        raise ProtocolError(
            "has not signed its first message with its key", who=who, expected="a signature of this connection's "
            "challenge, for this end's key", got=f"another one of key {first.key.hex()}",
        )  # fmt: skip
    return message


def _text(first: m.Signed, acceptor: bytes, nonce: bytes, purpose: str) -> bytes:
    rest = _joined(first.body, first.receipt, first.name.encode(), first.token.encode())
    return _joined(_VERSION, purpose.encode(), acceptor, first.key, nonce, hashlib.sha256(rest).digest())


def _joined(*fields: bytes) -> bytes:
    """All *fields*, each after its length: no two lists of fields give the same."""
    return b"".join(len(one).to_bytes(4, "big") + one for one in fields)


def make_receipt(masters: Sequence[Key], who: Identity) -> bytes:
    """A receipt for *who*, signed by each key of *masters*."""
    unsigned = m.KeyReceipt(who.name, who.key, who.role, list(who.groups), who.token, [])
    text = _receipt_text(unsigned)
    return encode_body(msgspec.structs.replace(unsigned, signatures=[key.sign(text) for key in masters]))


def read_receipt(receipt: bytes, key: bytes, masters: Collection[bytes]) -> Identity | None:
    """The identity that *receipt* gives to the owner of *key*; None: none, or no key of *masters* has signed it."""
    from wancoll.trust.keys import verify

    try:
        found = decode_body(receipt, m.KeyReceipt)
    except ProtocolError:
        return None
    text = _receipt_text(msgspec.structs.replace(found, signatures=[]))
    if found.key != key or not any(verify(one, made, text) for one in masters for made in found.signatures):
        return None
    return Identity(found.name, found.role, tuple(found.groups), found.token, found.key)


def _receipt_text(unsigned: m.KeyReceipt) -> bytes:
    return _joined(_VERSION, b"receipt", encode_body(unsigned))

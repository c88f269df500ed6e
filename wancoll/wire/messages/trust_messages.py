"""Messages about identities: the proof of a key, receipts, tokens, keys of masters. They pass over TLS only."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from wancoll.wire.messages.fields import First, Message, Name, Number, Seconds, Text

Role = Literal["peer", "relay", "observer", "chaos", "admin"]
RECEIPT_BYTES = 12 * 1024  # one for 64 groups with long names
PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]  # Ed25519
KeyInEpoch = Annotated[bytes, Meta(max_length=32)]  # the same; b"": in clear nobody has one
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
TokenId = Annotated[str, Meta(max_length=64)]


class Challenge(Message, frozen=True):
    """The first message of an acceptor. *nonce*: 32 random bytes, which whoever has dialled signs in Signed."""

    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Signed(Message, frozen=True):
    """The first message of whoever has dialled, and the proof of its key. docs/protocol.md says what is signed."""

    key: PublicKey
    signature: Signature
    body: Annotated[bytes, Meta(max_length=65536)]  # the message that it would have begun with in clear, in msgpack
    receipt: Annotated[bytes, Meta(max_length=RECEIPT_BYTES)] = b""  # a KeyReceipt in msgpack; b"": it has none
    name: Annotated[str, Meta(max_length=128)] = ""  # that a newcomer wants to be admitted by
    token: Annotated[str, Meta(max_length=256)] = ""  # "id.secret", to be admitted with


class KeyReceipt(Message, frozen=True):
    """A master's word that it has admitted the owner of *key*, by the fields of an Identity."""

    name: Name
    key: PublicKey
    role: Role
    groups: Annotated[list[Name], Meta(max_length=64)]
    token: TokenId
    signatures: Annotated[list[Signature], Meta(max_length=2)]  # of the same without any, one by each of its keys


class Admitted(Message, frozen=True):
    """To a daemon after each Welcome, and when the keys change: its receipt, and the keys that its masters show."""

    receipt: Annotated[bytes, Meta(max_length=RECEIPT_BYTES)]
    keys: Annotated[list[PublicKey], Meta(min_length=1, max_length=2)]  # the newest last


class MakeToken(First, frozen=True):
    """From `wancoll token create`; the fields are a Grant's, *seconds* until it expires (0: never)."""

    role: Role
    name: Annotated[str, Meta(max_length=128)]
    groups: Annotated[list[Name], Meta(max_length=64)]
    uses: Number
    seconds: Seconds


class RevokeToken(First, frozen=True):
    """From `wancoll token revoke`."""

    token: Name


class ListTokens(First, frozen=True):
    """From `wancoll token list`."""


class TokenInfo(Message, frozen=True):
    """A token as `wancoll token list` shows it."""

    id: str
    role: str
    name: str
    groups: list[str]
    uses: int  # 0: any number
    used: int  # of those that are counted
    expires: float  # seconds since 1970; 0: never
    revoked: bool
    replaced: bool = False  # the master's key that it names is not good any more


class Tokens(Message, frozen=True):
    """Answer to the three before. *refused*: why it is not done, or not for good; *made*: the text of a new token."""

    tokens: list[TokenInfo] = []
    made: str = ""
    refused: Text = ""


class AskKeys(First, frozen=True):
    """From `wancoll key show`."""


class RotateKey(First, frozen=True):
    """From `wancoll key rotate`: begin with a new key; *finish*: drop the old one; *now*: both, and void all else."""

    finish: bool = False
    now: bool = False


class RevokeKey(First, frozen=True):
    """From `wancoll key revoke`: the key of daemon *name* is void."""

    name: Name


class KeysAre(Message, frozen=True):
    """Answer to the three before. With *refused* nothing was done; *made*: a new token, where no other is good."""

    keys: list[PublicKey] = []  # that the master shows, the newest last
    made: str = ""
    refused: Text = ""


AboutTrust = MakeToken | RevokeToken | ListTokens | AskKeys | RotateKey | RevokeKey

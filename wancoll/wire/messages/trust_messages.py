"""Messages about identities: tokens, enrolment, rotation. They pass over TLS only; all but Renew come first."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from wancoll.wire.messages.fields import First, Message, Name, Number, Seconds, Text

PEM_BYTES = 16384
Pem = Annotated[bytes, Meta(max_length=PEM_BYTES)]
Role = Literal["peer", "observer", "chaos", "admin"]


class AskAuthority(First, frozen=True):
    """Asks for the authority's certificate, whose hash the token of the sender holds."""


class AuthorityIs(Message, frozen=True):
    """Answer to AskAuthority: whom to believe, that which signs first. Who has a token believes the one that it names.

    To a daemon after each Welcome, too, and whenever that changes.
    """

    certificates: Pem


class Enroll(First, frozen=True):
    """A token's secret for a certificate; *request* proves that its sender has the key."""

    token: Annotated[str, Meta(max_length=64)]
    secret: Annotated[str, Meta(max_length=128)]
    name: Name
    request: Pem


class Renew(Message, frozen=True):
    """Asks for the next certificate, over the connection that the present one opened."""

    request: Pem


class Enrolled(Message, frozen=True):
    """Answer to Enroll and Renew. With *refused*, why there is none, the certificate is empty."""

    certificate: Pem
    refused: Text = ""
    authorities: Pem = b""  # as AuthorityIs has them


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
    replaced: bool = False  # the authority that it names is not believed any more


class Tokens(Message, frozen=True):
    """Answer to the three before. *refused*: why it is not done, or not for good; *made*: the text of a new token."""

    tokens: list[TokenInfo] = []
    made: str = ""
    refused: Text = ""


class AskRotation(First, frozen=True):
    """From `wancoll ca show`."""


class Rotate(First, frozen=True):
    """From `wancoll ca rotate`; *seconds* of each phase (0: what is safe), *now*: the old one is dropped at once."""

    seconds: Seconds
    now: bool


class AuthorityInfo(Message, frozen=True):
    """An authority as `wancoll ca show` shows it; times are seconds since 1970."""

    sha256: str
    made: float
    ends: float
    signs: bool


class RotationIs(Message, frozen=True):
    """Answer to the two before. With *refused* nothing was done; *made*: a new token, where no other is good."""

    phase: str = ""
    until: float = 0.0  # seconds since 1970: the next phase; 0.0: none follows
    authorities: list[AuthorityInfo] = []
    made: str = ""
    refused: Text = ""


AboutTrust = AskAuthority | Enroll | Renew | MakeToken | RevokeToken | ListTokens | AskRotation | Rotate

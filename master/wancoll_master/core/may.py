"""The right to say a message to a master: one table, and may(), which reads it at the head of each step. Pure.

Three questions, in this order: may one of this role say such a thing at all? is it about a group that the identity is
for? and does it speak in its own name? Whether what is said can be true is asked later, by whoever takes it in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from wancoll.errors import ProtocolError
from wancoll.trust.identity import Identity, Role
from wancoll.wire import messages as m

EVERYTHING = Identity("", "admin")  # whoever connects, where all is in clear; no name of its own


@dataclass(frozen=True, slots=True)
class Rule:
    """The right to say a message."""

    roles: tuple[Role, ...]  # that may; admin may say all
    groups: Callable[[Any], Iterable[str]] = lambda _: ()  # that the message is about
    name: Callable[[Any], str] = lambda _: ""  # of the daemon that says it, which has to be the peer's own


def _its_group(message: Any) -> tuple[str, ...]:
    return (message.group,)


_OF_A_GROUP = Rule(("peer",), _its_group)
_OF_A_DAEMON = Rule(("peer",))

# By message. docs/security.md shows the same.
TABLE: dict[type, Rule] = {
    m.Hello: Rule(("peer", "relay"), name=lambda hello: hello.daemon),
    m.AtRelay: Rule(("peer",), name=lambda at: at.daemon),
    m.Heartbeat: Rule(("peer", "relay")),
    m.Stopping: _OF_A_DAEMON,
    m.LinkReport: _OF_A_DAEMON,
    **dict.fromkeys((m.Join, m.AskPlace, m.Leave, m.Report, m.Vote, m.Mismatch), _OF_A_GROUP),
    **dict.fromkeys((m.GiveUp, m.CalledWithGrace, m.Frozen, m.Differs, m.Written, m.LinkDown, m.Waits), _OF_A_GROUP),
    **dict.fromkeys((m.P2PCall, m.P2PDone, m.ProbeResult), _OF_A_GROUP),
    m.Ended: Rule(("peer",), lambda ended: {group for group, _ in ended.members}),
    m.StatusRequest: Rule(("peer", "observer", "chaos")),  # the answer tells of its groups alone
    m.AskElection: Rule(("peer", "relay")),
    m.Arm: Rule(("chaos",)),
    m.Evict: Rule((), _its_group),
    m.AskToLeave: Rule((), _its_group),
    m.MakeToken: Rule(()),
    m.RevokeToken: Rule(()),
    m.ListTokens: Rule(()),
    m.AskKeys: Rule(()),
    m.RotateKey: Rule(()),
    m.RevokeKey: Rule(()),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, in the words of an error."""

    who: str
    what: str
    expected: str
    hint: str

    def __str__(self) -> str:
        return f"{self.what}; expected {self.expected}; {self.hint}"

    def error(self) -> ProtocolError:
        """The same, to be raised."""
        return ProtocolError(self.what, expected=self.expected, got=self.who, hint=self.hint)


def may(identity: Identity | None, message: m.FromPeer) -> Refusal | None:
    """Why *message* may not be taken in from whoever has this *identity* (None: not verified); None: it may."""
    what = type(message).__name__
    rule = TABLE[type(message)]
    if identity is None:
        return Refusal(
            "somebody who has proved no key", f"may not say {what}", "a key that this master has admitted",
            "start it with --join and a token: `wancoll token create` makes one",
        )  # fmt: skip
    who = f"{identity.name} ({identity.role})" if identity.name else identity.role
    if identity.role != "admin" and identity.role not in rule.roles:
        allowed = " or ".join((*rule.roles, "admin"))
        return Refusal(
            who, f"may not say {what}", f"the role {allowed}, its own is {identity.role}",
            "a token of that role allows it: `wancoll token create --role`",
        )  # fmt: skip
    others = [] if not identity.groups else sorted(set(rule.groups(message)) - set(identity.groups))
    if others:
        return Refusal(
            who, f"may not say {what} of group {others[0]}", f"one of {', '.join(identity.groups)}",
            "a token for that group allows it: `wancoll token create --group`",
        )  # fmt: skip
    name = rule.name(message)
    if name and identity.name not in ("", name):
        return Refusal(
            who, f"may not say {what} as {name}", f"the name {identity.name}, that its key was admitted with",
            f"start it with --name {identity.name}, or with a token for {name}",
        )  # fmt: skip
    return None

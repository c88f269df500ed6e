"""Messages about relays, and those that a relay and its daemons say to each other."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from wancoll.limits import Limits
from wancoll.wire.messages.fields import Address, Addresses, First, Message, Name, Number, Text
from wancoll.wire.messages.trust_messages import KeyInEpoch

MOST_RELAYS = 8  # of a master
Ticket = Annotated[bytes, Meta(min_length=32, max_length=32)]  # random: whoever shows it is one end of a splice


class Way(IntEnum):
    """How one daemon reaches another one; a later way costs more."""

    direct = 0  # it dials
    punched = 1  # both dial each other at the same time, as the master's switch tells them: holes in their NATs
    relayed = 2

    def probed_within(self, limits: Limits) -> float:
        """Seconds after which a daemon that was asked to reach another one this way gives up."""
        return limits.punch_timeout if self is Way.punched else limits.probe_timeout


class RelayInfo(Message, frozen=True):
    """A relay that is here. No *addresses*: it is the master's own, at the master's address, with its keys."""

    name: Name
    addresses: Annotated[tuple[Address, ...], Meta(max_length=8)] = ()
    key: KeyInEpoch = b""  # its public key


AT_MASTER = RelayInfo("the master")


class Relays(Message, frozen=True):
    """From the master to a daemon: all relays that are here, after Welcome if there are any, and when that changes."""

    relays: Annotated[list[RelayInfo], Meta(max_length=MOST_RELAYS)]


class Nearby(Message, frozen=True):
    """From the master: *daemon*, whose connection comes from this one's public address, has these local addresses."""

    daemon: Name
    addresses: Addresses


class AtRelay(First, frozen=True):
    """First message of a daemon to a relay: dial me through this connection. RelayBeat answers."""

    daemon: Name


class RelayBeat(Message, frozen=True):
    """The daemon is alive, and so is the relay, which answers alike."""


class RelayDial(Message, frozen=True):
    """The daemon wants to reach daemon *to*; *number* is its own, for the answer.

    *punched*: not to be spliced: each end of the pair is told with Met where the other one is. At masters alone.
    """

    number: Number
    to: Name
    punched: bool = False


class RelayDialled(Message, frozen=True):
    """Answer to RelayDial. Who opens a connection with this *ticket* is spliced; with a *reason* it is refused."""

    number: Number
    ticket: Annotated[bytes, Meta(max_length=32)] = b""
    reason: Text = ""


class RelayCalled(Message, frozen=True):
    """Another daemon wants to reach this one: open a connection with this *ticket*, and take it for one that came."""

    ticket: Ticket
    punched: bool = False  # as in RelayDial


class Met(Message, frozen=True):
    """To both connections of a punched pair, once they are here: the other one comes from *address*. Dial it now."""

    address: Address


ToRelay = RelayBeat | RelayDial
FromRelay = RelayBeat | RelayDialled | RelayCalled

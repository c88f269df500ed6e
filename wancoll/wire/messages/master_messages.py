"""Messages from the master to a peer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.collective import Descriptor
from wancoll.wire.messages.client_messages import AskToLeave, Ok
from wancoll.wire.messages.epoch_messages import Epoch, EpochChange
from wancoll.wire.messages.fields import Addresses, Bits, Calls, First, Message, Name, Number, Real, Text
from wancoll.wire.messages.peer_messages import UpdateOutcome
from wancoll.wire.messages.relay_messages import Nearby, Relays, Way
from wancoll.wire.messages.status_messages import EvictAnswer, Status
from wancoll.wire.messages.trust_messages import Admitted, Challenge, KeyInEpoch, KeysAre, Tokens


class Welcome(First, frozen=True):
    """Answer to Hello. *term* grows with each master; times are seconds."""

    term: Number
    heartbeat_interval: Annotated[float, Meta(ge=1e-3, le=1e6)]
    heartbeat_timeout: Annotated[float, Meta(ge=1e-3, le=1e6)]
    master: Bits = 0  # random, fresh at each start of a master
    session: Number = 0  # names this connection, should it break
    resumed: bool = False  # Hello.session goes on: both say again what the other has not heard
    heard: Number = 0  # messages that the master took in over it (wire/kept.py)
    elected_by: Text = ""  # an etcd and its prefix; where nothing elects the master, its journal (R6)


class Pong(Message, frozen=True):
    """Answer to Heartbeat."""

    number: Number
    term: Number
    heard: Number = 0  # messages of the daemon that were taken in (wire/kept.py)
    watched: bool = False  # somebody looks at the master's page: heartbeats shall tell what moves
    clock: float = 0.0  # when the heartbeat was taken in, by the master's own clock; in Pong(0) none


class Joined(Message, frozen=True):
    """The Join is noted; *mid* names the member from now on. *reason* says what it waits for. Answers AskPlace, too."""

    group: Name
    member: Name
    mid: Number
    reason: Text


class Refused(Message, frozen=True):
    """The Join is refused, for good."""

    group: Name
    member: Name
    reason: Text
    evicted: bool = False  # nothing is wrong with it: an operator sent the joiner away


class Commit(Message, frozen=True):
    """All ops of *epoch* up to *upto* are committed."""

    group: Name
    epoch: Number
    upto: Number
    term: Number


class ForMember(Message, frozen=True):
    """Base of what is for member *to* alone, in its epoch."""

    group: Name
    to: Number
    epoch: Number


class Resumed(ForMember, frozen=True):
    """Answer to Report: all have reported, *epoch* goes on. Whatever of it is not settled is said (again) now."""

    term: Number


class Updated(Message, frozen=True):
    """After a restart: others were told this *outcome* of the update_membership at which member *to* stands."""

    group: Name
    to: Number
    outcome: UpdateOutcome


class Abort(Message, frozen=True):
    """Stop the ops of *epoch*; the next Epoch follows. With *ask* > 0: answer with Mismatch for seq *ask*.

    Where members commit: answer with Frozen, too.
    """

    group: Name
    epoch: Number
    ask: Number
    reason: Text


class ContributeZeros(ForMember, frozen=True):
    """If the client of member *to* has not made this *call* at *seq*, the daemon takes part in it with zeros (R20)."""

    seq: Number
    call: Descriptor


class Matched(ForMember, frozen=True):
    """The send or recv *number* of member *to* has found its other half. Pairs of two members run in their *order*."""

    number: Number
    order: Number  # counts the group's pairs of a send and a recv


class Settled(ForMember, frozen=True):
    """The send or recv *number* of member *to* is committed, or failed with *error*, a class of wancoll.errors."""

    number: Number
    digest: Bits  # of the bytes, as the receiver has them
    error: Annotated[str, Meta(max_length=128)]
    text: Text
    calls: Calls
    other: Number = 0  # number of the other half


class Evicted(Message, frozen=True):
    """Member *mid* is out. Ops up to *committed_upto* had committed, with the digests of all who were done.

    Above it and up to *unknown_upto* ops may have committed with this member, and it was not asked for its results:
    what it has is the result only where it is in *digests*. What lies above both has not happened.
    """

    group: Name
    mid: Number
    reason: Text
    committed_upto: Number
    unknown_upto: Number = 0
    epoch: Number = 0  # that *digests* are of
    digests: Annotated[list[tuple[Number, Bits, Bits]], Meta(max_length=8192)] = []  # as in Report.done


class Waited(ForMember, frozen=True):
    """Answer to Waits: what the group's oldest slow operation waits for, in words; "": not known."""

    seq: Number  # of that operation; 0: none
    text: Text
    parked: Annotated[list[Number], Meta(max_length=1024)]  # mids that hold the member's bytes back for good reason


class Redial(ForMember, frozen=True):
    """Member *to* shall make its links to *others* (empty: all) anew that are up for longer than *older* seconds.

    *sends*: only those for sends and recvs, or (False) only those for collectives; None: both.

    What is on them is lost: the other end has let go of them, or nothing moves and nobody knows why.
    """

    others: Annotated[list[Number], Meta(max_length=1024)]
    older: Real
    reason: Text
    sends: bool | None = None


class Probe(Message, frozen=True):
    """Member *prober* of your daemon: say whether a data port answers at *addresses* (those of *target*)."""

    group: Name
    joiner: Number  # whose admission it is for; 0: of the target's daemon the connection broke, is it there?
    prober: Number
    target: Number
    daemon: Name  # who should answer there
    addresses: Addresses
    key: KeyInEpoch = b""  # its public key
    way: Way = Way.direct


class MeasureLink(Message, frozen=True):
    """Measure the path to *daemon* at *addresses* with about *nbytes* of data, when nothing else is under way."""

    daemon: Name
    addresses: Addresses
    nbytes: Number
    key: KeyInEpoch = b""  # its public key
    way: Way = Way.direct


class StandsBy(Message, frozen=True):
    """Instead of Welcome or Status: this master does not lead, *leader* does ("host:port"; "": nobody is known to)."""

    leader: Annotated[str, Meta(max_length=300)]
    term: Number  # of the leader; 0: not known
    elected_by: Text = ""  # Welcome.elected_by of whoever leads; "": not known
    why: Text = ""  # nobody leads, as far as this master knows


class Bye(Message, frozen=True):
    """The master closes this connection, and why."""

    reason: Text
    final: bool = False  # this daemon, a newcomer, must not come back: another one has its name


_OfEpoch = Commit | Epoch | EpochChange | Abort | Resumed | Updated | Evicted
_OfMember = Joined | Refused | ContributeZeros | Matched | Settled | Waited | Redial
ToMember = _OfEpoch | _OfMember  # all have a group
AnswersOfTrust = Tokens | KeysAre
_ToDaemon = Welcome | StandsBy | Bye | Pong | Probe | MeasureLink | AskToLeave | Relays | Nearby
FromMaster = ToMember | _ToDaemon | Challenge | Admitted | AnswersOfTrust | Status | EvictAnswer | Ok

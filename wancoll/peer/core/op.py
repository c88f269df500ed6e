"""One op on its way, a collective or a send or recv, and the states of its life. Pure.

    state      entered when                               left when
    waiting    called, or late (R20); an epoch began; an  a collective: its links are up -> running
               Abort                                      a send or recv: the master has the other half -> matched
    matched    Matched came                               the link and those before it on the link are ready -> running
                                                          there is no link: Settled -> ended
    running    handed to the engine: one more attempt     the engine has let go of this and all older ones -> done
    done       its vote, or P2PDone, was sent; a later    committed, or Settled -> ended
               round may run it again (C12)
    given_up   the master was told GiveUp                 the master voids it -> ended (R14)
    ended      its outcome is known                       the engine has let go of its memory -> the client is told

A new epoch takes what it does not end back to waiting, from any state (R2, R4). An Abort does so with collectives that
are running, and where the master collects with those that are done; so does a new round with those that are running. A
waiting collective that cannot run in the epoch, or shall not run again, is given up.

An attempt has an engine id of its own. A new epoch cancels it, and the next one may start before the engine has said
Cancelled: both then read the input and write the result. So `live` keeps every attempt for which the engine may still
touch memory, and nothing is said before it is empty: no vote, since the digest must be of the bytes that will be read
(R13), and no outcome, since the client may then use the memory again (R3). A finish that crosses its cancel is of an
older attempt and says nothing.

Only the table in which an op stands (op_table.py) changes its state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from wancoll.collective import Kind
from wancoll.peer.core.calls import Call, ResolvedCall
from wancoll.wire import messages as m


class OpState(Enum):
    """See the table."""

    waiting = auto()
    matched = auto()
    running = auto()
    done = auto()
    given_up = auto()
    ended = auto()


@dataclass(slots=True, eq=False)
class Op:
    """One op of this member."""

    number: int  # in the order of the calls: a collective's seq; of a send or recv it counts this member's own
    client_id: int  # the client's own number for it; 0: it has not called this, which its daemon takes part in for it
    call: Call
    input_buffer: int  # offset of the caller's bytes in the arena
    result_buffer: int  # offset of the result in the arena
    tag: int  # of a send or recv
    posted_at: float  # seconds on the shell's clock
    seq: int  # its number on the wire; of a send or recv the master gives one in each epoch
    filled: int = -1  # offset of the table that says which blocks of the input are there; -1: all of them are
    ahead: bool = False  # of a recv: a send that does not fit it passes it by
    shown: int = -1  # offset of the table that says which blocks of the result are final; -1: nobody looks
    kind: Kind = field(init=False)
    p2p: bool = field(init=False)  # whether it is a send or recv
    there: bool = field(init=False)  # the client has filled the input
    state: OpState = OpState.waiting
    attempts: int = 0
    engine_id: int = 0  # of the current attempt
    live: set[int] = field(default_factory=set)  # attempts whose memory the engine may still touch
    ran: bool = False  # it was started in the current epoch
    finished: bool = False  # the current attempt came to its end in the engine
    resolved: ResolvedCall | None = None  # of the call, in the current attempt's epoch
    digest: int = 0
    bytes_sent: int = 0
    bytes_in_memory: int = 0
    bytes_saved: int = 0
    codec_error: float = 0.0
    outcome: m.Result | m.Failure | None = None
    zeros: bool = False  # the daemon takes part for a client that is late (R20), in memory of its own
    memory: object = None  # then: that memory, which the shell holds
    handed: int = 0  # and bytes of it that the client has room for
    vote: bytes = b""  # which the engine may send to `hearers` (mids) when it has finished the current attempt
    hearers: tuple[int, ...] = ()
    voted_to: tuple[int, ...] = ()  # those to whom it has
    round: int = 0  # of the epoch, in which it was last started
    input_hash: int | None = None  # of its input, during an attempt after the first; the shell holds it
    beside: object = None  # memory for a result that nobody reads, of runs for others' sake (C12); the shell holds it

    def __post_init__(self) -> None:
        self.kind, self.p2p = self.call.posted.kind, self.call.p2p
        self.there = self.filled < 0

    @property
    def other(self) -> int:
        """Mid of the other side of a send or recv."""
        return self.call.world.mids[self.call.peer]

    @property
    def other_name(self) -> str:
        """Name of the other side of a send or recv."""
        return self.call.world.names[self.call.peer]

    def __str__(self) -> str:
        call = self.call.posted
        if not self.p2p:
            return str(call)
        side = "dest" if call.kind is Kind.send else "source"
        label = f", label={call.label}" if call.label else ""
        return f"{call.kind.name}({call.count} x {call.dtype.name}, {side}={self.other_name}, tag={self.tag}{label})"

"""A member's sends and recvs, pure: told to the master, matched by it, moved over a link of their own, committed.

    state      entered when                              left when
    told       called; an epoch began (R4)               the master has found the other half -> matched
    matched    Matched came                              those before it on the link and the link are ready -> running
    running    handed to the engine                      the engine has moved the bytes -> done
    done       ExchangeDone was sent                     Settled -> ended; a new epoch -> told
    ended      its outcome is known                      the engine let go of its memory -> client is told

They take no seq, since only two members call them. Those with one member run in the master's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from wancoll.errors import ProtocolError
from wancoll.peer.core.calls import World
from wancoll.peer.core.ops import (
    CancelOp,
    Command,
    Exchange,
    ExchangeState,
    NeedLinks,
    StartExchange,
    ToClient,
    ToMaster,
    failure,
)
from wancoll.peer.core.outcomes import too_small
from wancoll.wire import messages as m

_KEPT = 1024


class Exchanges:
    """See the module.

    Args:
        group: name of the group.
        name: this member's name.
        take_engine_id: gives a fresh one.
    """

    def __init__(self, group: str, name: str, take_engine_id: Callable[[], int]) -> None:
        self.group, self.name = group, name
        self.open: dict[int, Exchange] = {}  # by number
        self._take_engine_id = take_engine_id
        self._by_engine_id: dict[int, Exchange] = {}
        self._next_number = 1
        self._epoch: m.Epoch | None = None
        self._mid = 0
        self._names: dict[int, str] = {}  # of present members, by mid
        self._up: set[int] = set()  # members to whom the link for exchanges is up
        self._asked: set[int] = set()  # members to whom it was asked for
        # For a new master: the other half may not have heard what came of them.
        self.heard = 0  # highest order that a master told
        self.settlements: dict[int, int] = {}  # order -> digest of the newest that committed
        self.misfits: deque[tuple[int, int]] = deque(maxlen=_KEPT)  # (mid, number) of the other half

    def waiting_for(self) -> str:
        """One phrase for status: what the oldest call waits for."""
        for op in self.open.values():
            match op.state:
                case ExchangeState.told:
                    return f"{op} waits for the call of {op.other_name}"
                case ExchangeState.matched:
                    return f"{op} waits for its link"
                case ExchangeState.running:
                    return f"{op} is moving data"
            return f"{op} is finished here and waits for {op.other_name}"
        return ""

    # ---- from the client -----------------------------------------------------------------------------

    def post(self, post: m.Post, knew: World | None, now: float) -> list[Command]:
        """The client, which knew the members *knew*, calls send or recv.

        Raises:
            ProtocolError: nothing that can be called.
        """
        size = len(knew.mids) if knew is not None else 0
        if knew is None or not 0 <= post.peer < size or knew.mids[post.peer] == self._mid:
            expected = "the rank of another member in an epoch that this member has told its client lately"
            got = f"rank {post.peer} of epoch {post.epoch}"
            raise ProtocolError("posted a call that cannot be", who=self.name, expected=expected, got=got)
        op = Exchange(self._next_number, post, knew.mids[post.peer], knew.names[post.peer], now)
        self._next_number += 1
        self.open[op.number] = op
        return self._tell_master(op)

    # ---- from the master -----------------------------------------------------------------------------

    def cancel(self) -> list[Command]:
        """Take the current attempts out of the engine."""
        live = (op.engine_id for op in self.open.values() if op.engine_id in op.live and op.outcome is None)
        return [CancelOp(engine_id) for engine_id in sorted(live)]

    def enter(self, epoch: m.Epoch, mid: int) -> list[Command]:
        """A new epoch: what is not settled is told again, in the order of the calls, or ends with its other half."""
        self._epoch, self._mid = epoch, mid
        self._names = {member.mid: member.name for member in epoch.members}
        self._up.clear()
        self._asked.clear()
        commands: list[Command] = []
        for op in list(self.open.values()):
            if op.state is not ExchangeState.ended:
                op.state = ExchangeState.told
                commands += self._tell_master(op)
        return commands

    def matched(self, message: m.Matched) -> list[Command]:
        """The master has found the other half."""
        op = self._of(message)
        if op is None or op.state is not ExchangeState.told:
            return []
        op.state, op.order = ExchangeState.matched, message.order
        self.heard = max(self.heard, message.order)
        return self._start_with(op.other)

    def settled(self, message: m.Settled, now: float) -> list[Command]:
        """Committed, or failed, on both sides."""
        op = self._of(message)
        if op is None or op.state is ExchangeState.ended:
            return []
        if not message.error:
            if len(self.settlements) >= _KEPT:
                del self.settlements[next(iter(self.settlements))]
            self.settlements[op.order] = message.digest
            return self._end(op, self._result(op, message.digest, now))
        if message.other:
            self.misfits.append((op.other, message.other))
        fits = message.error == "OutcomeUnknown"
        hint = "input and result are kept" if fits else "make sends and recvs that fit on both members"
        text = {"who": self.name, "got": f"here {op}", "hint": hint}
        return self._end(op, failure(op.post.id, message.error, message.text, **text, calls=dict(message.calls)))

    # ---- from the links and the engine ---------------------------------------------------------------

    def links_up(self, mids: Collection[int]) -> list[Command]:
        """The links for exchanges to *mids* are up."""
        fresh = sorted(set(mids) - self._up)
        self._up = set(mids)
        return [command for mid in fresh for command in self._start_with(mid)]

    def link_lost(self, other: int) -> bool:
        """The link for exchanges to *other* is down. Returns whether bytes may be lost with it."""
        self._up.discard(other)
        self._asked.discard(other)
        under_way = (ExchangeState.running, ExchangeState.done)
        return any(op.other == other and op.state in under_way for op in self.open.values())

    def wanted(self, other: int) -> list[Command]:
        """Ask for the link to *other* again, if something waits for it."""
        return self._start_with(other)

    def finished(self, engine_id: int, digest: int, bytes_sent: int) -> list[Command]:
        """The engine has moved the last byte of an attempt."""
        op = self._by_engine_id.pop(engine_id, None)
        if op is None:
            return []
        op.live.discard(engine_id)
        if engine_id == op.engine_id and op.state is ExchangeState.running:
            op.finished, op.bytes_sent = True, bytes_sent
            op.digest = 0 if op.sends else digest
        return self._let_go(op)

    def cancelled(self, engine_id: int) -> list[Command]:
        """The engine has let go of an attempt's memory."""
        op = self._by_engine_id.pop(engine_id, None)
        if op is None:
            return []
        op.live.discard(engine_id)
        return self._let_go(op)

    # ---- a new master --------------------------------------------------------------------------------

    def reported(self) -> list[m.OpenP2P]:
        """What is not settled, in the order of the calls."""
        moving = (ExchangeState.matched, ExchangeState.running, ExchangeState.done)
        return [
            m.OpenP2P(
                op.number,
                op.other,
                op.sends,
                op.order,
                op.state in moving,
                op.state is ExchangeState.done,
                op.digest if op.state is ExchangeState.done else 0,
            )
            for op in self.open.values()
            if op.state is not ExchangeState.ended
        ]

    def tell_again(self) -> list[Command]:
        """The epoch goes on with a new master: tell it what has not found its other half."""
        commands: list[Command] = []
        for op in list(self.open.values()):
            if op.state is ExchangeState.told:
                commands += self._tell_master(op)
        return commands

    # ---- the end -------------------------------------------------------------------------------------

    def end_all(self, end: Callable[[int, bool], m.Failure]) -> list[Command]:
        """The member is out: *end* says what is told of a call, by its number and whether it was done here."""
        commands: list[Command] = self.cancel()
        for op in list(self.open.values()):
            if op.state is not ExchangeState.ended:
                commands += self._end(op, end(op.post.id, op.state is ExchangeState.done))
        return commands

    # ---- inside --------------------------------------------------------------------------------------

    def _of(self, message: m.Matched | m.Settled) -> Exchange | None:
        current = self._epoch is not None and message.epoch == self._epoch.epoch
        return self.open.get(message.number) if current else None

    def _tell_master(self, op: Exchange) -> list[Command]:
        assert self._epoch is not None
        epoch, post = self._epoch, op.post
        ends = (min(self._mid, op.other), max(self._mid, op.other))
        if len(epoch.members) < epoch.min_world:
            return self._end(op, too_small(post.id, str(op), epoch))
        what, got = "", ""
        if op.other not in self._names:
            what = f"{op.other_name}, the other side, has left the group or was lost"
            got = epoch.reason
        elif ends in epoch.plan.avoid:
            what = f"{self.name} and {op.other_name} cannot reach each other"
        if what:
            return self._end(
                op, failure(op.post.id, "OperationAborted", what, who=str(op), got=got, hint="the tensor is untouched")
            )
        call = (self.group, self._mid, epoch.epoch, op.number, op.other, post.tag, op.sends, post.dtype, post.count)
        return [ToMaster(m.P2PCall(*call))]

    def _start_with(self, other: int) -> list[Command]:
        """Start what is matched with member *other*, if the link is up; ask for it, if not."""
        waiting = [op for op in self.open.values() if op.other == other and op.state is ExchangeState.matched]
        if not waiting:
            return []
        if other not in self._up:
            if other in self._asked:
                return []
            self._asked.add(other)
            return [NeedLinks(frozenset({other}), p2p=True)]
        return [self._start(op) for op in sorted(waiting, key=lambda op: op.order)]

    def _start(self, op: Exchange) -> Command:
        op.state, op.finished = ExchangeState.running, False
        op.attempts += 1
        op.engine_id = self._take_engine_id()
        op.live.add(op.engine_id)
        self._by_engine_id[op.engine_id] = op
        return StartExchange(op)

    def _let_go(self, op: Exchange) -> list[Command]:
        """After the engine let go of something: report it done, or tell the client an outcome that waited for that."""
        if op.live:
            return []
        if op.outcome is not None:
            return self._tell(op)
        if op.state is ExchangeState.running and op.finished:
            assert self._epoch is not None
            op.state = ExchangeState.done
            return [ToMaster(m.P2PDone(self.group, self._mid, self._epoch.epoch, op.order, op.digest))]
        return []

    def _end(self, op: Exchange, outcome: m.Result | m.Failure) -> list[Command]:
        op.state, op.outcome = ExchangeState.ended, outcome
        return [] if op.live else self._tell(op)

    def _tell(self, op: Exchange) -> list[Command]:
        assert op.outcome is not None
        del self.open[op.number]
        return [ToClient(op.outcome)]

    def _result(self, op: Exchange, digest: int, now: float) -> m.Result:
        assert self._epoch is not None
        return m.Result(
            id=op.post.id,
            seq=op.order,
            epoch=self._epoch.epoch,
            contributors=[self.name, op.other_name] if op.sends else [op.other_name, self.name],
            digest=digest,
            attempts=op.attempts,
            algorithm="direct",
            bytes_sent=op.bytes_sent,
            seconds=now - op.posted_at,
            bytes_saved=0,
            codec_error=0.0,
        )

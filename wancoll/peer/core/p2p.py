"""A member's sends and recvs: matched by the master, moved over links of their own, settled on both sides. Pure.

The states are in op.py. Only two members call a pair's halves, so they take no seq (R16): the master matches a send
with the other side's recv and gives the pair an order, by which pairs of the same two members run on their link.
Nothing of a match is carried from epoch to epoch: what is not settled is told again in the next one, in the order of
the calls, and gets another order. What is of another epoch is dropped (R12). A call whose other side is gone ends; so
does one between two who cannot reach each other: the link to the other is asked for again and again, and each time that
it was not made in time the master is told, who ends both halves.

Settled may have reached one half only when the master dies. So the newest settlements are kept for its successor, which
tells the other half (R7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from wancoll.collective import Kind
from wancoll.limits import Limits, keep_newest
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links, outcomes
from wancoll.peer.core.calls import Call, EpochView
from wancoll.peer.core.liveness.master_session import MasterSession
from wancoll.peer.core.op import Op, OpState
from wancoll.peer.core.op_table import Attempts, OpTable
from wancoll.wire import messages as m

_KEPT = 1024
_HINTS = {
    "CollectiveMismatch": "make sends and recvs that fit on both members",
    "OperationAborted": "the tensor is untouched; unless it says more, see that both machines can connect to each "
    "other's data port",
}


class P2P(OpTable):
    """A member's sends and recvs."""

    def __init__(self, attempts: Attempts, master_session: MasterSession, limits: Limits) -> None:
        super().__init__(attempts, master_session, limits)
        self._called = 0
        self._up: set[int] = set()  # members to whom the link for sends and recvs is up
        self._asked: set[int] = set()  # members to whom it was asked for
        # For a new master: the other half may not have heard what came of them.
        self.heard = 0  # highest order that a master told
        self.settlements: dict[int, int] = {}  # order -> digest of the newest that committed
        self.failed: deque[tuple[int, int, str]] = deque(maxlen=_KEPT)  # mid, number of the other half; the error

    def done(self, op: Op) -> m.P2PDone:
        """The bytes have left, or are here."""
        return m.P2PDone(*self.view.head, op.seq, _digest(op))

    def refuse(self, op: Op, reason: str) -> list[cmd.Command]:
        """The engine does not take *op*: the master ends both halves."""
        op.state = OpState.given_up
        return [cmd.ToMaster(m.P2PDone(*self.view.head, op.seq, 0, reason))]

    # ---- from the client -----------------------------------------------------------------------------

    def post(self, post: m.Post, call: Call, now: float) -> list[cmd.Command]:
        """The client calls send or recv."""
        self._called = number = self._called + 1
        at = post.input_buffer, post.result_buffer
        op = Op(number, post.id, call, *at, post.tag, now, 0, post.filled, post.ahead, post.shown)
        self.open[number] = op
        return self._tell_master(op)

    # ---- from the master -----------------------------------------------------------------------------

    def enter(self, view: EpochView) -> list[cmd.Command]:
        """A new epoch: what is not settled is told again, in the order of the calls, or ends with its other half."""
        self.view = view
        self._up.clear()
        self._asked.clear()
        commands: list[cmd.Command] = []
        for op in list(self.open.values()):
            if op.state is not OpState.ended:
                op.state = OpState.waiting
                commands += self._tell_master(op)
        return commands

    def matched(self, message: m.Matched) -> list[cmd.Command]:
        """The master has found the other half."""
        op = self._of(message)
        if op is None or op.state is not OpState.waiting:
            return []
        op.state, op.seq = OpState.matched, message.order
        self.heard = max(self.heard, message.order)
        return self._start_with(op.other)

    def settled(self, message: m.Settled, now: float) -> list[cmd.Command]:
        """Committed, or failed, on both sides."""
        op = self._of(message)
        if op is None or op.state is OpState.ended:
            return []
        if not message.error:
            keep_newest(self.settlements, op.seq, message.digest, _KEPT)
            names = [self._name, op.other_name] if op.kind is Kind.send else [op.other_name, self._name]
            return self.end(op, outcomes.result(op, self.view.epoch.epoch, names, message.digest, now))
        if message.other:
            self.failed.append((op.other, message.other, message.error))
        head = (op.client_id, message.error, message.text)
        hint = _HINTS.get(message.error, "input and result are kept")
        failure = m.Failure(*head, who=self._name, got=f"here {op}", hint=hint, calls=dict(message.calls))
        commands: list[cmd.Command] = [cmd.CancelOp(op.engine_id)] if op.engine_id in op.live else []
        commands += self.end(op, failure)
        waits = any(one.state is OpState.matched and one.other == op.other for one in self.open.values())
        if op.other in self._asked - self._up and not waits:
            self._asked.discard(op.other)
            commands.append(links.LetGo(op.other))
        return commands

    # ---- from the links ------------------------------------------------------------------------------

    def links_up(self, mids: Collection[int]) -> list[cmd.Command]:
        """The links for sends and recvs to *mids* are up."""
        fresh = sorted(set(mids) - self._up)
        self._up = set(mids)
        return [command for mid in fresh for command in self._start_with(mid)]

    def link_lost(self, other: int, reason: str) -> list[cmd.Command]:
        """The link to *other* is down: the epoch is over if bytes may be lost with it; else it is asked for again."""
        self._up.discard(other)
        self._asked.discard(other)
        if self.uses(other):
            return [self._master_session.link_down(self.view, other, "lost", reason, sends=True)]
        return self._start_with(other)

    def link_unreachable(self, other: int, reason: str) -> list[cmd.Command]:
        """The link to *other* was not made in time: if a call waits for it, tell the master, and ask for it again."""
        self._asked.discard(other)
        again = self._start_with(other)
        return (
            [self._master_session.link_down(self.view, other, "unreachable", reason, sends=True), *again]
            if again
            else []
        )

    # ---- a new master --------------------------------------------------------------------------------

    def reported(self) -> list[m.OpenP2P]:
        """What is not settled, in the order of the calls."""
        told = []
        for op in self.open.values():
            if op.state is not OpState.ended:
                moving, done = op.state is not OpState.waiting, op.state is OpState.done
                sends = op.kind is Kind.send
                told.append(m.OpenP2P(op.number, op.other, sends, op.seq, moving, done, _digest(op) if done else 0))
        return told

    def tell_again(self) -> list[cmd.Command]:
        """The epoch goes on with a new master: tell it what has not found its other half."""
        waiting = [op for op in self.open.values() if op.state is OpState.waiting]
        return [command for op in waiting for command in self._tell_master(op)]

    # ---- inside --------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self.view.world.names[self.view.rank]

    def _of(self, message: m.Matched | m.Settled) -> Op | None:
        return self.open.get(message.number) if message.epoch == self.view.epoch.epoch else None

    def _tell_master(self, op: Op) -> list[cmd.Command]:
        view, call = self.view, op.call.posted
        if view.too_small:
            return self.end(op, outcomes.too_small(op, str(op), view.epoch))
        refusal = self.resolved(op).refusal
        if refusal:
            got = view.epoch.reason if op.other not in view.world.mids else ""
            hint = "the tensor is untouched"
            lost = m.Failure(op.client_id, "OperationAborted", refusal, who=str(op), got=got, hint=hint)
            return self.end(op, lost)
        sends = op.kind is Kind.send
        said = m.P2PCall(*view.head, op.number, op.other, op.tag, sends, call.dtype, call.count, call.label, op.ahead)
        return [cmd.ToMaster(said)]

    def _start_with(self, other: int) -> list[cmd.Command]:
        """Start what is matched with member *other*, if the link is up; ask for it, if not."""
        waiting = [op for op in self.open.values() if op.state is OpState.matched and op.other == other]
        if not waiting:
            return []
        if other in self._up:
            waiting.sort(key=lambda op: op.seq)
            return [self.start(op, self.resolved(op)) for op in waiting]
        if other in self._asked:
            return []
        self._asked.add(other)
        return [links.Need(frozenset({other}), links.P2P)]


def _digest(op: Op) -> int:
    """Digest of the received bytes; 0 for a send."""
    return 0 if op.kind is Kind.send else op.digest

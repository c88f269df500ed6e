"""What collectives and sends and recvs share of their life in the engine: start, finish, cancel, end. Pure."""

from __future__ import annotations

from collections.abc import Callable

from wancoll.limits import Limits
from wancoll.peer.core import commands as cmd
from wancoll.peer.core.calls import EpochView, ResolvedCall
from wancoll.peer.core.liveness.master_session import MasterSession
from wancoll.peer.core.op import Op, OpState
from wancoll.wire import messages as m


class Attempts:
    """Finds the operation of an engine id; one for all ops of a member, whose ids count up from *first_engine_id*."""

    def __init__(self, first_engine_id: int) -> None:
        self.next = first_engine_id
        self.ops: dict[int, Op] = {}


class OpTable:
    """Ops of one sort that have not ended, by number, which is the order of the calls."""

    view: EpochView  # once there is an epoch; the client cannot call before

    def __init__(self, attempts: Attempts, master_session: MasterSession, limits: Limits) -> None:
        self.open: dict[int, Op] = {}
        self._attempts, self._master_session, self._limits = attempts, master_session, limits

    def resolved(self, op: Op) -> ResolvedCall:
        """What *op* means in the current epoch."""
        return op.call.resolved(self.view, self._limits)

    def done(self, op: Op) -> m.FromPeer:
        """What the master is told of *op*, which is finished here."""
        raise NotImplementedError

    def start(self, op: Op, resolved: ResolvedCall) -> cmd.Command:
        """Hand *op*, which is *resolved* in this epoch, to the engine."""
        op.state, op.ran, op.finished, op.resolved = OpState.running, True, False, resolved
        op.attempts += 1
        return self.hand_over(op)

    def hand_over(self, op: Op, *, beside: bool = False) -> cmd.Command:
        """Another attempt of *op*; *beside*: see StartOp."""
        op.engine_id = self._attempts.next
        self._attempts.next += 1
        self._attempts.ops[op.engine_id] = op
        op.live.add(op.engine_id)
        return cmd.StartOp(op, beside)

    def refuse(self, op: Op, reason: str) -> list[cmd.Command]:
        """The engine has not taken *op*, for this *reason*; nothing of the attempt is left."""
        raise NotImplementedError

    def cancel(self) -> list[cmd.Command]:
        """Take the current attempts out of the engine."""
        ops = self.open.values()
        return [cmd.CancelOp(op.engine_id) for op in ops if op.engine_id in op.live and op.outcome is None]

    def uses(self, other: int) -> bool:
        """Whether an attempt may have bytes on the way to or from member *other* that are not committed."""
        under_way = (op for op in self.open.values() if op.state in (OpState.running, OpState.done))
        return any(op.resolved is not None and other in op.resolved.needs for op in under_way)

    def settle(self, op: Op) -> list[cmd.Command]:
        """The engine has let go of an attempt of *op*: say that it is done, or tell the client what waited for that."""
        if op.state is OpState.running and op.finished and not op.live:
            op.state = OpState.done
            return self.say_done(op)
        return self._close(op)

    def _close(self, op: Op) -> list[cmd.Command]:
        """Tell the client the outcome, if there is one and the engine has let go of all attempts."""
        if op.outcome is None or op.live:
            return []
        del self.open[op.number]
        return self.tell(op, op.outcome)

    def written(self, op: Op) -> list[cmd.Command]:
        """The client has written to the input of *op*, which runs: the master is to put this member out (R13)."""
        return [self._master_session.say(m.Written(*self.view.head, str(op)[:4000]), "written")]

    def say_done(self, op: Op) -> list[cmd.Command]:
        """Tell who commits it that *op* is done here."""
        return [cmd.ToMaster(self.done(op))]

    def tell(self, op: Op, outcome: m.Result | m.Failure) -> list[cmd.Command]:
        """Nothing of *op* is under way any more: the client may hear its *outcome*."""
        return [cmd.ToClient(outcome, op)]

    def end(self, op: Op, outcome: m.Result | m.Failure) -> list[cmd.Command]:
        """Fix an op's outcome; the client hears of it once the engine has let go of the op's memory."""
        op.state, op.outcome = OpState.ended, outcome
        return self._close(op)

    def end_all(self, outcome: Callable[[Op], m.Failure]) -> list[cmd.Command]:
        """The member is out."""
        commands = self.cancel()
        for op in list(self.open.values()):
            if op.state is not OpState.ended:
                commands += self.end(op, outcome(op))
        return commands

"""What became of operations, phase by phase, while somebody traces: a bounded ring of attempts. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from wancoll.collective import Kind
from wancoll.peer.core.op import Op, OpState

ROWS = 1 << 16  # kept: the newest


@dataclass(slots=True)
class Attempt:
    """One try of an operation.

    *at* are seconds on the shell's clock, in this order, those that it came to. posted: the call reached its daemon, or
    the try before was over; seen: the trace began, and it was under way; started: its links are up, the engine has it;
    first, last: bytes of others came; done: its result stands here, or the engine has let go of it; committed: its
    client is told; until: the trace was over, and it was under way, or it failed before the engine had it.
    """

    op: Op
    group: str
    member: str
    epoch: int
    number: int
    at: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Attempts of one daemon's members, from when it was made."""

    def __init__(self) -> None:
        self.rows: deque[dict[str, object]] = deque(maxlen=ROWS)
        self._running: dict[int, Attempt] = {}  # by engine id
        self._done: dict[Op, Attempt] = {}
        self._again: dict[Op, float] = {}  # since when it has to run again

    def found(self, op: Op, group: str, member: str, epoch: int, now: float) -> None:
        """*op* was called before; the engine may have it, or have finished it."""
        attempt = Attempt(op, group, member, epoch, op.attempts, {"posted": op.posted_at, "seen": now})
        if op.state is OpState.running:
            self._running[op.engine_id] = attempt
        elif op.state in (OpState.done, OpState.given_up, OpState.ended):
            self._done[op] = attempt

    def started(self, op: Op, group: str, member: str, epoch: int, now: float) -> None:
        """The engine has *op*. What it had finished in an earlier epoch counts for nothing."""
        if (before := self._done.pop(op, None)) is not None:
            self._keep(before, "aborted")
            self._again[op] = max(before.at.values())
        posted = self._again.pop(op, op.posted_at if op.attempts <= 1 else now)
        made = Attempt(op, group, member, epoch, op.attempts, {"posted": posted, "started": now})
        self._running[op.engine_id] = made

    def finished(self, engine_id: int, first: float, last: float, now: float, *, cancelled: bool) -> None:
        """The engine has let go of it. *first* and *last*: when others' bytes came, 0: none did."""
        attempt = self._running.pop(engine_id, None)
        if attempt is None:
            return
        begun = attempt.at.get("started", 0.0)
        if first and begun:  # it may come while the engine is still being told; before the trace nobody looked
            attempt.at["first"] = begun = max(first, begun)
            attempt.at["last"] = begun = max(last, begun)
        attempt.at["done"] = max(now, begun)
        if cancelled or attempt.op.engine_id != engine_id:
            self._keep(attempt, "aborted")
            if attempt.number == attempt.op.attempts:
                self._again[attempt.op] = attempt.at["done"]
        else:
            self._done[attempt.op] = attempt

    def told(self, op: Op, group: str, member: str, epoch: int, contributors: int, error: str, now: float) -> None:
        """The client of *op* is told that it is committed, or failed with *error*."""
        since = self._again.pop(op, op.posted_at)
        attempt = self._done.pop(op, None) or self._running.pop(op.engine_id, None)
        if attempt is not None:
            attempt.at["committed"] = max(now, *attempt.at.values())
            self._keep(attempt, error or "committed", contributors)
        elif error:  # before the engine had it, or not again
            self._keep(Attempt(op, group, member, epoch, op.attempts + 1, {"posted": since, "until": now}), error)

    def over(self, op: Op, group: str, member: str, epoch: int, now: float) -> None:
        """The trace is, and *op* is open: what it has come to. The outcome is its state's name."""
        attempt = self._running.pop(op.engine_id, None) or self._done.pop(op, None)
        if attempt is None:
            since = self._again.pop(op, op.posted_at)
            attempt = Attempt(op, group, member, epoch, op.attempts + 1, {"posted": since})
        attempt.at["until"] = max(now, *attempt.at.values())
        self._keep(attempt, op.state.name)

    def _keep(self, attempt: Attempt, outcome: str, contributors: int = 0) -> None:
        op, call = attempt.op, attempt.op.call
        self.rows.append(
            {
                "group": attempt.group,
                "member": attempt.member,
                "epoch": attempt.epoch,
                "seq": op.seq,
                "op": Kind(op.kind).name,
                "algorithm": op.resolved.algorithm if op.resolved is not None else "",
                "codec": (call.posted if op.resolved is None else op.resolved.descriptor).codec.name,
                "bytes": max(call.input_bytes, call.result_bytes),
                "attempt": attempt.number,
                "contributors": contributors,
                "outcome": outcome,
                "at": attempt.at,
            }
        )

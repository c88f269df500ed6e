"""The training process of a chaos run: calls collectives, checks every value, joins again when it is evicted."""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import wancoll
from wancoll.chaos.core import workload
from wancoll.chaos.core.records import Called, Held, Joined, NotJoined, Record
from wancoll.chaos.core.workload import Array, Step
from wancoll.collective import Receipt

_UPDATE_EVERY = 8  # steps between update_memberships
_RETRY = 0.1  # seconds between tries to connect
_POLL = 0.01  # seconds between looks at the phase while held
_ENDS = frozenset(  # the membership is over
    {"Evicted", "MasterUnreachable", "OutcomeUnknown", "PeerDaemonLost", "TimeoutError", "ConfigError", "ProtocolError"}
)
_ENDED = (wancoll.Evicted, wancoll.MasterUnreachable, wancoll.OutcomeUnknown, wancoll.PeerDaemonLost)
_SAME = ("all_reduce", "all_gather", "broadcast")  # kinds whose result is the same bytes on all members
_KEPT_TEXT = 600

HELD = frozenset({1, 3})  # phases in which clients stand still
LAST = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """What all clients of a run are told."""

    group: str  # its name
    seed: int  # of the workload
    slots: int  # members that there can be
    largest: int  # bytes of the largest tensor
    start_world: int  # as connect's
    min_world: int  # as connect's
    deadline: float  # seconds within which every call must end
    phase: str  # path of the file with the number of the run's phase
    spoil: bool = False  # m1 changes a result after its commit; for the tool's own test


@dataclass(frozen=True, slots=True)
class _Call:
    """One call that is under way."""

    what: str  # for people
    kind: str  # of the collective
    nbytes: int  # of the caller's tensor
    wait: Callable[[float], Receipt]  # returns its receipt; its argument is the timeout in seconds
    check: Callable[[Receipt], str] = lambda _: ""  # what is wrong with the result, "" if nothing is
    check_failed: Callable[[], str] = lambda: ""  # what is wrong with the tensors after an error
    result: Array | None = None  # the bytes that all members shall have alike; None: each has its own
    may_abort: bool = False  # whether a lost member may end it with OperationAborted


class _Over(Exception):
    """The membership is over."""


def churn(socket: str, settings: Settings, slot: int) -> Iterator[Record]:
    """Member *slot*: take part until the run's phase is LAST. A generator, for ClientProcess.

    What it logs goes beside the daemons' logs: the terminal is the run's.
    """
    log = os.path.join(os.path.dirname(socket), f"client-m{slot}.log")
    logging.basicConfig(filename=log, format="%(asctime)s %(message)s")
    return (yield from _Client(socket, settings, slot).run())


class _Client:
    def __init__(self, socket: str, settings: Settings, slot: int) -> None:
        self._socket, self._settings, self._slot = socket, settings, slot
        self._step = 0
        self._phase = 0  # that all members have agreed on
        self._partners: tuple[str, ...] = ()  # of the last commit: all who took part know them
        self._comm: Any = None

    def run(self) -> Iterator[Record]:
        settings = self._settings
        while self._phase < LAST and self._word() < LAST:
            try:
                self._comm = wancoll.connect(
                    settings.group, name=f"m{self._slot}", socket=self._socket, start_world=settings.start_world,
                    min_world=settings.min_world, timeout=settings.deadline,
                )  # fmt: skip
            except (wancoll.WancollError, TimeoutError) as bad:
                yield NotJoined(type(bad).__name__)
                time.sleep(_RETRY)
                continue
            yield Joined(time.monotonic())
            try:
                yield from self._take_part()
            except _Over:
                pass
            finally:
                self._comm.close()

    def _take_part(self) -> Iterator[Record]:
        yield from self._meet()
        while self._phase < LAST:
            if self._phase in HELD:
                yield Held()
                while self._word() == self._phase:
                    time.sleep(_POLL)
                yield from self._meet()
                continue
            step = workload.step(self._settings.seed, self._step, self._settings.largest, self._settings.slots)
            try:
                calls = self._calls(step)
            except _ENDED as bad:  # before all of them were under way
                now, error = time.monotonic(), type(bad).__name__
                yield Called(str(step), step.kind, 0, now, now, self._comm.epoch, error=error, text=str(bad))
                raise _Over from bad
            yield from self._run(calls)
            self._step += 1
            if self._step % _UPDATE_EVERY == 0:
                update = _Call("update_membership()", "update_membership", 0, self._comm.update_membership)
                yield from self._run([update])
                yield from self._meet()

    def _word(self) -> int:
        """The phase that the run is to go to."""
        try:
            with open(self._settings.phase, encoding="ascii") as file:
                return int(file.read())
        except (OSError, ValueError):
            return 0

    def _meet(self) -> Iterator[Record]:
        """All members agree on the step and the phase. Newcomers begin here, the others come here after each update."""
        where = np.array([self._step, self._word()], np.int64)

        def meet(timeout: float) -> Receipt:
            return self._comm.all_reduce(where, op="max", timeout=timeout)  # type: ignore[no-any-return]

        yield from self._run([_Call("all_reduce(step and phase, max)", "all_reduce", where.nbytes, meet, result=where)])
        self._step, self._phase = int(where[0]), int(where[1])

    def _run(self, calls: list[_Call]) -> Iterator[Called]:
        """Wait for the calls in turn, check what they gave, report."""
        begun = time.monotonic()
        for call in calls:
            epoch, receipt, error, text = self._comm.epoch, None, "", ""
            try:
                receipt = call.wait(self._settings.deadline)
            except (wancoll.WancollError, TimeoutError) as bad:
                error, text = type(bad).__name__, str(bad)[:_KEPT_TEXT]
            ended = time.monotonic()
            common = (call.what, call.kind, call.nbytes, begun, ended)
            if receipt is None:
                wrong = "" if error == "TimeoutError" else call.check_failed()
                yield Called(*common, epoch, error=error, text=text, wrong=wrong, may_abort=call.may_abort)
                if error in _ENDS:
                    raise _Over
                continue
            self._partners = receipt.contributors
            result, wrong = "", call.check(receipt)
            if call.kind in _SAME:
                result = receipt.digest
                if call.result is not None:
                    result += f" {zlib.crc32(call.result.tobytes()):08x}"
            yield Called(
                *common, receipt.epoch, receipt.seq, receipt.contributors, result,
                wrong=wrong, may_abort=call.may_abort,
            )  # fmt: skip

    # ---- the calls of a step -------------------------------------------------------------------------

    def _calls(self, step: Step) -> list[_Call]:
        if step.kind == "all_reduce":
            return [self._all_reduce(step, index) for index in range(step.depth)]
        if step.kind == "broadcast":
            root = self._partners[step.root % len(self._partners)]
            if root in self._comm.members:  # else everybody will know that it is lost, whatever they call
                return [self._broadcast(step, root)]
        elif step.kind != "barrier":
            return [self._exchange(step)]
        return [_Call(f"{step}: barrier()", "barrier", 0, self._comm.barrier, may_abort=step.kind == "broadcast")]

    def _all_reduce(self, step: Step, index: int) -> _Call:
        mine = workload.contribution(step, self._slot, index)
        in_arena = (step.number + index + self._slot) % 3 == 0  # members may differ in this
        x = self._comm.empty(step.count, mine.dtype) if in_arena else mine.copy()
        x[:] = mine
        out = x if step.in_place else np.full(step.count, 77, x.dtype)
        old = out.copy()
        options: dict[str, Any] = {
            "op": step.op, "codec": step.codec, "algorithm": step.algorithm, "on_failure": step.on_failure,
        }  # fmt: skip
        target = None if step.in_place else out
        if step.depth > 1:
            wait = self._comm.all_reduce(x, target, async_op=True, **options).wait
        else:

            def wait(timeout: float) -> Receipt:
                return self._comm.all_reduce(x, target, timeout=timeout, **options)  # type: ignore[no-any-return]

        def check(receipt: Receipt) -> str:
            if self._settings.spoil and self._slot == 1:
                out[:1] += 1
            wrong = workload.compare(step, _slots(receipt), out, index)
            return wrong or (workload.same(x, mine) if target is not None else "")

        def check_failed() -> str:
            return workload.same(out, old) or workload.same(x, mine)

        may_abort = step.on_failure == "raise"
        return _Call(str(step), "all_reduce", x.nbytes, wait, check, check_failed, out, may_abort)

    def _broadcast(self, step: Step, root: str) -> _Call:
        mine = workload.contribution(step, self._slot)
        x = mine.copy()

        def wait(timeout: float) -> Receipt:
            rank = self._comm.members.index(root)
            return self._comm.broadcast(x, root=rank, timeout=timeout)  # type: ignore[no-any-return]

        def check(_: Receipt) -> str:
            return workload.same(x, workload.contribution(step, int(root[1:])))

        return _Call(
            f"{step} from {root}", "broadcast", x.nbytes, wait, check, lambda: workload.same(x, mine), x, may_abort=True
        )

    def _exchange(self, step: Step) -> _Call:
        """A collective with a block for or from each member."""
        here = [int(name[1:]) for name in self._comm.members]
        if step.kind == "all_gather":
            x = workload.contribution(step, self._slot)
        else:
            x = np.concatenate([workload.contribution(step, self._slot, other) for other in here])
        old, got = x.copy(), [x]

        def wait(timeout: float) -> Receipt:
            more = {"op": step.op} if step.kind == "reduce_scatter" else {}
            receipt: Receipt = getattr(self._comm, step.kind)(x, timeout=timeout, **more)
            got[0] = np.asarray(receipt.out).reshape(-1)
            return receipt

        def check(receipt: Receipt) -> str:
            slots = _slots(receipt)
            if step.kind == "reduce_scatter":
                wrong = workload.compare(step, slots, got[0], self._slot)
            else:
                shift = 0 if step.kind == "all_gather" else self._slot
                blocks = [workload.contribution(step, slot, shift) for slot in slots]
                wrong = workload.same(got[0], np.concatenate(blocks))
            return wrong or workload.same(x, old)

        return _Call(str(step), step.kind, x.nbytes, wait, check, lambda: workload.same(x, old))


def _slots(receipt: Receipt) -> list[int]:
    return [int(name[1:]) for name in receipt.contributors]

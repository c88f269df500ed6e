"""torch's handle of an operation: when it is finished, its future, and the threads that complete futures.

wait() blocks on the caller's own thread, which reads the daemon's socket with the GIL released. Only a future that was
asked for needs a thread. One thread at a time looks for what is finished; before it completes a future, whose callbacks
may block in a collective of their own, another takes its place.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd import Variable

from wancoll.client.awaiting import begin, join
from wancoll.client.connection import Connection, deadline_after, seconds_left
from wancoll.client.work import Work
from wancoll.collective import Receipt
from wancoll.errors import TimeoutError, WancollError
from wancoll.torch.backend.untraced import untraced

log = logging.getLogger("wancoll")

UNSET = timedelta(0)  # torch's word for no timeout, in wait(); in options it is -1 ms
_LOOK_SECONDS = 0.2  # at the most between two looks at deadlines
_IDLE_SECONDS = 5.0  # then a thread without work ends
_STOP_SECONDS = 2.0  # at the end of the process, for callbacks that run
_THREAD = "wancoll-future"
_MOST_THREADS = 64  # callbacks that may block at once; more of them wait for these
# A future that Python completes holds a Python object. One that TorchScript completes holds what C++ takes for tensors.
_LISTED = """
def _after(done: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def listed(done: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(_after, done, tensors)
"""


@untraced
class Operation(dist.Work):
    """One operation, made of one or more calls of the client, its *parts*.

    *deadline* is a time.monotonic(); None: never. *explain* turns an error of a call into the one that is raised.
    *finish* runs once when all parts are committed, with their receipts; what it raises is the operation's error.
    *result* is what the future and result() give.
    """

    def __init__(
        self, name: str, parts: Sequence[Work], deadline: float | None, completer: Completer,
        explain: Callable[[WancollError], Exception], finish: Callable[[list[Receipt]], None],
        result: list[torch.Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self._name, self._parts, self.deadline, self._completer = name, list(parts), deadline, completer
        self._explain, self._finish, self._result = explain, finish, result
        self._settling = threading.Lock()
        self._settled = False
        self._error: Exception | None = None
        self._late: Exception | None = None  # what the future was told, while the operation went on
        self._base: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self.source = -1
        self.led = False  # by its last call: if that fails, the others are not waited for
        self.for_cpp = False  # its future is asked for by code of torch's that takes no Python object
        self._in_backward = False  # which raises its error; its future does not

    @property
    def finished(self) -> bool:
        """Whether all its calls are, or the last has failed where it leads."""
        parts = self._parts
        return all(part.finished for part in parts) or (self.led and parts[-1].failed)

    def settle(self) -> bool:
        """Whether it has ended; if so its result is where it belongs."""
        if not self._settled and self.finished:
            with self._settling:
                self._end()
        return self._settled

    def _end(self) -> None:
        if self._settled:  # another thread was first
            return
        try:
            self._run_to_end()
        except WancollError as bad:
            self._error = self._explain(bad)
        except Exception as bad:
            self._error = bad
        self._parts = self._parts[:0]
        self._finish = lambda _receipts: None
        self._settled = True

    def _run_to_end(self) -> None:
        if self.led:
            self._parts[-1].wait()  # may raise while others are pending
        self._finish([part.wait() for part in self._parts])

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Block until it has ended.

        Raises:
            WancollError: it failed, or has not ended in time: then it goes on, and wait() may be called again.
        """
        own = timeout.total_seconds()
        deadline = deadline_after(own) if own > 0 else self.deadline
        if not self._completer.connection.wait_any(cast("list[Work]", [self]), seconds_left(deadline)):
            raise self._still_pending()
        self.settle()
        if self._error is not None:
            raise self._error
        return True

    def _calls(self) -> Sequence[Work]:
        return self._parts

    def _still_pending(self) -> Exception:
        try:
            for part in self._calls():
                part.wait(0)
        except WancollError as late:
            return self._explain(late)
        return self._explain(TimeoutError(f"{self._name} ended after the time given"))

    def is_completed(self) -> bool:
        """Whether wait() would return or raise at once."""
        if not self.finished:
            self._completer.connection.wait_any(cast("list[Work]", [self]), 0)
        return self.settle()

    def is_success(self) -> bool:
        """Whether it has ended, and well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """What it failed with."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._result

    def synchronize(self) -> None:
        """Do as wait()."""
        self.wait()

    def source_rank(self) -> int:
        """The rank that a recv's message came from."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future with result(). It is complete when that is there, never before."""
        with self._settling:
            new = self._future is None
            if new:
                on = {each.device for each in self._result if each.device.type == "cuda"}
                devices: list[int | str | torch.device] = sorted(on, key=str)
                self._base = torch.futures.Future(devices=devices)
                # Not set_exception(), which takes C++ callers down: what a callback raises reaches everybody.
                self._future = self._base.then(self._outcome)
                if self.for_cpp:
                    self._future = _script().listed(self._future, self._result)
        if new:
            if self.settle():
                self.complete()
            else:
                self._completer.watch(self)
        return self._future

    def raise_in_backward(self) -> None:
        """Let backward, if one runs, raise the error when torch's reducer has waited for the future.

        A future's error becomes a plain RuntimeError there.
        """
        queue = Variable._execution_engine.queue_callback
        with suppress(RuntimeError):  # no backward runs
            queue(lambda: queue(self._raise))  # once more: the reducer's own callback is queued after the first
            self._in_backward = True

    def _raise(self) -> None:
        if self._late is not None:
            raise self._late
        self.wait()

    def _outcome(self, _base: Any) -> list[torch.Tensor]:
        error = self._error or self._late
        if error is not None and not self._in_backward:
            raise error
        return self._result

    def complete(self) -> None:
        """Complete the future: with what it has come to, or because it is late. Runs callbacks."""
        if not self.settle():
            self._late = self._still_pending()
        assert self._base is not None
        self._base.set_result(None)


@cache
def _script() -> Any:
    return torch.jit.CompilationUnit(_LISTED)


class Completer:
    """The threads that complete the futures of one connection's operations.

    At the end of the process they stop before connections close: futures that are not complete then stay so.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._changed = threading.Condition()
        self._watched: list[Operation] = []
        self._leads = False  # some thread looks for what is finished
        self._threads = self._idle = 0
        self._closed = self._stopped = False
        _completers.add(self)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)  # runs before what was registered so far, which closes connections

    def watch(self, operation: Operation) -> None:
        """Complete its future when it has ended or is late."""
        with self._changed:
            self._watched.append(operation)
            if not self._leads:
                self._call_one()

    def close(self) -> None:
        """Threads end when they have nothing to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """No future is completed from now on. A thread in a callback ends when that returns."""
        self._stopped = True
        self.close()

    def _call_one(self) -> None:
        if self._idle:
            self._changed.notify()
        elif self._threads < _MOST_THREADS and not self._stopped:
            self._threads += 1
            begin(self._run, _THREAD)

    def _run(self) -> None:
        while self._takes_the_lead():
            operation = self._await_one()
            if operation is None:
                return
            with self._changed:
                self._leads = False
                self._watched.remove(operation)
                if self._watched:
                    self._call_one()
            try:
                operation.complete()
            except Exception:
                log.exception("completing the future of %r failed", operation)
            del operation  # else it lives until the next one

    def _takes_the_lead(self) -> bool:
        """Wait until there is something to look for, and nobody who does; False: not for a while."""
        with self._changed:
            until = time.monotonic() + _IDLE_SECONDS
            while self._leads or not self._watched or self._stopped:
                if self._closed or time.monotonic() >= until:
                    self._threads -= 1
                    return False
                self._idle += 1
                self._changed.wait(until - time.monotonic())
                self._idle -= 1
            self._leads = True
            return True

    def _await_one(self) -> Operation | None:
        """The next one that has ended or is late; None: stopped."""
        while not self._stopped:
            now, wait = time.monotonic(), _LOOK_SECONDS
            for operation in list(self._watched):
                left = wait if operation.deadline is None else operation.deadline - now
                if operation.finished or left <= 0:
                    return operation
                wait = min(wait, left)
            # The list is looked at as it is then: what is watched meanwhile is seen, too.
            self.connection.wait_any(cast("list[Work]", self._watched), wait)
        return None


_completers: weakref.WeakSet[Completer] = weakref.WeakSet()
os.register_at_fork(after_in_child=_completers.clear)  # its threads are the parent's


def _at_exit() -> None:
    """No thread may be in torch's C++ when the interpreter ends."""
    for each in list(_completers):
        each.stop()
    join(_STOP_SECONDS, _THREAD)

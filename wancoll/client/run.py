"""run(): a member that comes back. A loop around connect(), with nothing that a caller could not write."""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

from wancoll.client.checks import check_seconds
from wancoll.client.communicator import Communicator
from wancoll.client.connect import Connecting, connect
from wancoll.errors import (
    ConfigError,
    Evicted,
    MasterUnreachable,
    OutcomeUnknown,
    PeerDaemonLost,
    WancollError,
    WorldTooSmall,
)

log = logging.getLogger("wancoll")

COMES_BACK = (Evicted, MasterUnreachable, OutcomeUnknown, PeerDaemonLost)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0  # seconds before it connects again; each is twice the one before
_HAUNTED_SECONDS = 15.0  # after a loss: so long its own older self may be a member still, and hold its name

# Kinds of functions that a call does not run.
_ONLY_MADE = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)

T = TypeVar("T")


def run(
    train: Callable[[Communicator], T],
    group: str = "default",
    *,
    patience: float | None = None,
    **options: Unpack[Connecting],
) -> T:
    """Connect and call train(comm), again and again until it returns: a member that survives what it can survive.

    *train* keeps its state outside itself and begins with sync_state, so that it goes on from the state of whoever is
    furthest. Then each step counts once, whatever is killed on the way: an operation that failed has changed nothing
    here, and one whose outcome is unknown has happened if another member has it.

    After Evicted, MasterUnreachable, OutcomeUnknown and PeerDaemonLost it leaves, waits a little (longer each time in a
    row, up to 15 s) and connects again. After WorldTooSmall it waits for joiners in update_membership(), and calls
    *train* again. It says so in the log. Every other exception ends it.

    Args:
        train: gets a new communicator each time; arrays of the one before are not in its arena.
        group: as connect's.
        patience: seconds without a place in the group, at the start and after each loss, after which it raises what
            it met last: TimeoutError, where it waited for the group. None: no limit.
        options: as connect's; timeout is for each try. With either, a member that comes back when the others have
            finished does not wait for ever.

    Returns:
        What *train* returns.

    Raises:
        ConfigError: *train* cannot be called with a communicator; it has not joined.
        BaseException: what *train* or connect() raises, but for the above.
    """
    _check_train(train)
    check_seconds("run", "patience", patience, zero=False)
    check_seconds("run", "timeout", options.get("timeout"))
    comeback = _Comeback(group, patience)
    while True:
        try:
            comm = connect(group, **comeback.bounded(options))
        except (*COMES_BACK, ConfigError) as bad:
            if isinstance(bad, ConfigError) and not comeback.haunted:
                raise
            comeback.wait(bad)
            continue
        comeback.succeeded(comm)
        try:
            with comm:
                return _train(train, comm)
        except COMES_BACK as bad:
            if isinstance(bad, OutcomeUnknown) and not isinstance(bad.__cause__, (*COMES_BACK, type(None))):
                raise  # an operator's wish, or what connecting again does not cure
            comeback.lost()
            comeback.wait(bad)


def _check_train(train: Any) -> None:
    who, expected = "run(train=...)", "a function that takes the communicator"
    called = getattr(train, "__name__", None) or repr(train)[:200]
    if not callable(train):
        hint = "call it as run(train, group), with the function itself"
        raise ConfigError("train cannot be called", who=who, expected=expected, got=called, hint=hint)
    if any(is_one(train) for is_one in _ONLY_MADE):
        raise ConfigError(
            "train would not run when it is called", who=who, expected=expected,
            got=f"{called}, which is asynchronous or a generator", hint="start the event loop inside train",
        )  # fmt: skip
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # of some that are written in C
        return
    try:
        signature.bind(None)
    except TypeError as bad:
        raise ConfigError(
            "train cannot be called with a communicator", who=who, expected=expected,
            got=f"{called}({', '.join(signature.parameters)})", hint="functools.partial gives it what else it needs",
        ) from bad  # fmt: skip


def _train(train: Callable[[Communicator], T], comm: Communicator) -> T:
    while True:
        try:
            return train(comm)
        except WorldTooSmall as bad:
            log.warning("group %r: %s; waiting for joiners", comm.group, bad)
            for work in comm.pending:
                with contextlib.suppress(WancollError):
                    work.wait()
            comm.update_membership()


class _Comeback:
    """When to connect again, and whether at all."""

    def __init__(self, group: str, patience: float | None) -> None:
        self._group, self._patience = group, patience
        self._pause = _FIRST_PAUSE
        self._since = time.monotonic()  # without a place
        self._was_there = False
        self._said = ""

    @property
    def haunted(self) -> bool:
        """Whether the master may not have noticed yet that the member is gone."""
        return self._was_there and time.monotonic() - self._since < _HAUNTED_SECONDS

    def bounded(self, options: Connecting) -> Connecting:
        """The *options* of connect, with the timeout that patience leaves."""
        if self._patience is None:
            return options
        left, timeout = max(0.0, self._since + self._patience - time.monotonic()), options.get("timeout")
        return {**options, "timeout": left if timeout is None else min(left, timeout)}

    def lost(self) -> None:
        """It had a place."""
        self._since, self._was_there = time.monotonic(), True

    def succeeded(self, comm: Communicator) -> None:
        """It has a place."""
        if self._was_there:
            log.warning("group %r: back as %r, rank %d of %d", self._group, comm.name, comm.rank, comm.world_size)
        self._pause, self._said = _FIRST_PAUSE, ""

    def wait(self, bad: WancollError) -> None:
        """Before the next try; raises *bad* where patience is over."""
        pause = self._pause * random.uniform(0.5, 1.0)  # not all members at once
        if self._patience is not None and time.monotonic() + pause - self._since > self._patience:
            raise bad
        said = f": {bad}" if str(bad) != self._said else ", as before"
        self._said = str(bad)
        log.warning("group %r: %s%s; connecting again in %.1f s", self._group, type(bad).__name__, said, pause)
        time.sleep(pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

"""The connection to the peer daemon: posting calls, waiting for answers, and how it ends. Plain blocking Python.

Threads: any number may post and wait at the same time. Calls are posted one after the other; of the threads that wait,
one reads the socket for all.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wancoll.client.channel import Channel
from wancoll.client.checks import check_seconds
from wancoll.client.cuda.staging import Staging
from wancoll.client.island import Watch
from wancoll.client.memory.arena import Arena
from wancoll.client.memory.placement import Placement
from wancoll.client.private import PrivateDaemon
from wancoll.client.work import Work, as_failure, cut_off, rebuild
from wancoll.errors import ConfigError, DeviceError, ProtocolError, TimeoutError, WancollError
from wancoll.limits import DEFAULT
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

log = logging.getLogger("wancoll")

_READ_WHILE_POSTING = 128  # pending calls from which on a call also takes in the answers that are there
_FOLLOW_SECONDS = 1.0  # then look again: the thread that reads may have been interrupted before it woke the others
_READ_SECONDS = 1.0  # then look again: a Ctrl-C just before the call into the kernel does not interrupt that call
_LEAST_SECONDS = 0.01  # of one wait for a place
_LOOK_SECONDS = 0.1  # between two looks at what may end that wait
_SAY_SECONDS = 3.0  # from then on somebody who waits for a place is told for what
_SAY_AGAIN_SECONDS = 5.0  # at the least between two such lines
_CLOSE_SECONDS = 5.0  # close() waits this long for a thread that is reading


class Parting(NamedTuple):
    """Why an epoch began without a member, in the master's words, and whether it is *lost*: it said no goodbye."""

    reason: str
    lost: bool


class Connection:
    """One member's connection, after the handshake."""

    place: m.EpochInfo  # in the group: rank and members of the current epoch
    label = ""  # of every call's descriptor
    ahead = False  # of every recv: as Post has it
    closed = False  # by this process

    def __init__(
        self, group: str, channel: Channel, arena: Arena, private: PrivateDaemon | None, shards: int = 1
    ) -> None:
        self.group, self.arena, self.shards = group, arena, shards
        self.staging = Staging(arena)
        self._channel, self._private = channel, private
        self._pid = os.getpid()
        self._over: m.Failure | None = None  # why the connection is over
        self._pending: dict[int, Work] = {}  # posted, not finished; in program order
        self._last_id = 0
        # Why streams waited for calls in vain, by number of the call; the next call raises it.
        self.regrets: dict[int, WancollError] = {}
        self.partings: dict[str, Parting] = {}  # who has gone since this member came; of many the last
        self._slow: m.Slow | None = None  # what the daemon said last of a call that waits
        self._posting = threading.Lock()
        self._turn = threading.Lock()
        self._reading = False  # some thread reads the socket; becomes true under _turn
        self._followers: list[threading.Lock] = []  # of threads that wait for it; guarded by _turn
        self._watch: Watch | None = None

    @property
    def pending(self) -> tuple[Work, ...]:
        """Calls that are not finished, in program order."""
        return tuple(self._pending.copy().values())  # a copy at once: other threads post and finish

    @property
    def daemon(self) -> str:
        """For people: the daemon that it goes through."""
        private = f"; private, of master {self._private.master}" if self._private is not None else ""
        return self._channel.who + private

    @property
    def share(self) -> tuple[int, int]:
        """Which share of an input a ring begins with here, and of how many."""
        place = self.place  # one look: the thread that reads replaces it
        return place.rank, len(place.members)

    @property
    def state(self) -> str:
        """For people: the place in the group, or why there is none."""
        if self._over is not None:
            return f"over ({self._over.error})"
        place = self.place
        return f"rank {place.rank} of {len(place.members)}, epoch {place.epoch}"

    def await_place(self, deadline: float | None, look: Callable[[], None] | None = None) -> None:
        """Block until the group's first epoch stands, or this joiner has been admitted.

        *look* is called now and then, and ends the wait by what it raises.

        Raises:
            TimeoutError: not by *deadline*, a time.monotonic().
            WancollError: refused, or the connection is gone.
        """
        began = time.monotonic()
        say_at, said = began + _SAY_SECONDS, ""
        while not hasattr(self, "place"):
            if self._over is not None:
                raise rebuild(self._over)
            left = seconds_left(deadline)
            waits = self._slow.text if self._slow is not None else "for a word of the master"
            if left == 0:
                raise TimeoutError(
                    "did not take this member in by the time given", who=f"group {self.group!r}",
                    expected=f"a place after {time.monotonic() - began:.1f} s",
                    got=f"{self._channel.who} waits: {waits}", hint="`wancoll status` shows who is there",
                )  # fmt: skip
            until_said = say_at - time.monotonic()
            if waits == said:
                until_said = math.inf
            elif until_said <= 0:
                said, say_at = waits, time.monotonic() + _SAY_AGAIN_SECONDS
                log.warning("group %r: still waiting for a place: %s", self.group, waits)
            if look is not None:
                look()
                until_said = min(until_said, _LOOK_SECONDS)
            self._step(None, min(math.inf if left is None else left, max(until_said, _LEAST_SECONDS)))

    # ---- posting -------------------------------------------------------------------------------------

    def post(self, work: Work, deadline: float | None = None) -> None:
        """Send a call to the daemon, unless that was done already; an answer will finish it.

        Raises:
            ConfigError: its memory is in use, or the arena is full; nothing was sent.
            TimeoutError: the daemon, or a device, did not take it in time; nothing was sent.
            DeviceError: a device failed; nothing was sent.
            WancollError: the connection is over, or a stream waited for an earlier call in vain; nothing was sent.
        """
        self.check_usable()
        for number in list(self.regrets):
            if (regret := self.regrets.pop(number, None)) is not None:
                raise regret
        pending = self._pending
        if len(pending) >= _READ_WHILE_POSTING:
            self._step(None, 0)
            while len(pending) >= DEFAULT.ops_in_flight:
                self._wait_for_room(work, deadline)
        with self._posting:
            if work.finished or self._pending.get(work.id) is work:
                return  # by another thread, or before an interruption
            try:
                if work.placement is not None:
                    self.check_free(work.placement, work.descriptor)
                    work.placement.prepare(deadline)
                while not self._send(work):
                    self._wait_for_room(work, deadline)
            except BaseException:
                if work.placement is not None and self._pending.get(work.id) is not work:
                    work.placement.end()
                raise

    def check_free(
        self,
        placement: Placement,
        who: object,
        expected: str = "a tensor that no pending call writes, and an out that none uses",
    ) -> None:
        """Refuse memory that a pending call uses. Raises ConfigError: so it is."""
        for other in self.pending:
            earlier = other.placement  # another thread may be finishing it
            if earlier is not None and placement.conflicts(earlier):
                raise ConfigError(
                    "the memory is in use by a call that is not finished",
                    who=str(who),
                    expected=expected,
                    got=f"memory of call {other.id}, {other.descriptor}",
                    hint="wait() for that call first",
                )

    def _send(self, work: Work) -> bool:
        ring, sent = self._channel.ring, list[int]()
        posted = ring.posted
        # An interruption may have come before the last one was noted here.
        number, placement = max(self._last_id, posted.number) + 1, work.placement
        offsets = (placement.input_buffer, placement.result_buffer) if placement is not None else (0, 0)
        filled, shown = (placement.filled, placement.shown) if placement is not None else (-1, -1)
        ends = (False, False, False)
        if placement is not None:
            ends = placement.input_coded, placement.result_coded, placement.result_kept
        call = work.descriptor
        first = ring.way(call, work.epoch) if work.peer < 0 and not any(ends) else None
        if first is None:
            data = encode(
                m.Post(number, call, *offsets, work.epoch, work.peer, work.tag, filled, work.ahead, shown, *ends)
            )
        work.id = number
        work.posted_at = time.monotonic()
        try:
            self._pending[number] = work
            if self._over is not None:  # after it is among the pending: whoever ends it meanwhile fails it too
                raise rebuild(self._over)
            if first is None:
                self._channel.send(data, sent)
            else:
                ring.post(number, first, (*offsets, filled, shown))
        except OSError:
            return False  # full; or gone, and whoever reads finds out why
        finally:
            if sent or posted.number == number:
                self._last_id = number
            else:
                self._pending.pop(number, None)  # the connection's end, in another thread, takes it away as well
        return True

    def _wait_for_room(self, work: Work, deadline: float | None) -> None:
        """The daemon is behind: take in answers until it reads again."""
        left = seconds_left(deadline)
        if left == 0:
            raise TimeoutError(
                f"{work.descriptor} of group {self.group!r} was not posted in time: "
                f"{len(self._pending)} calls are pending",
            )
        if len(self._pending) >= DEFAULT.ops_in_flight:
            self._step(None, left)
        else:
            self._channel.wait_ready(left)
            self._step(None, 0)

    # ---- waiting -------------------------------------------------------------------------------------

    def wait(self, work: Work, timeout: float | None) -> None:
        """Return once *work* is finished. Raises TimeoutError: it is not, after *timeout* seconds."""
        check_seconds("wait", "timeout", timeout)
        if not self._finish(work, timeout):
            raise self._still_pending(work)

    def wait_any(self, works: Sequence[Work], timeout: float | None) -> bool:
        """Return once one of *works* is finished (True), or after *timeout* seconds (False)."""
        return self._finish(_AnyOf(works), timeout)

    def _finish(self, work: Work | _AnyOf, timeout: float | None) -> bool:
        self._check_process()
        deadline = deadline_after(timeout)
        while not work.finished:
            left = seconds_left(deadline)
            pause = math.inf
            for each in self.pending:
                placement = each.placement  # another thread may be finishing it
                if placement is not None:
                    pause = min(pause, placement.pause)
            self._step(work, pause if left is None else min(left, pause))
            self._look()
            if left == 0 and not work.finished:
                return False
        return True

    def _still_pending(self, work: Work) -> TimeoutError:
        return TimeoutError(
            f"{work.descriptor} of group {self.group!r}, call {work.id} of member {self.place.member!r}, is still "
            f"pending {time.monotonic() - work.posted_at:.3f} s after it was posted{self._why(work)}",
            hint="nothing is lost: .work.wait() goes on waiting",
            work=work,
        )

    def _why(self, work: Work) -> str:
        """What the daemon said of the call, or of the one before it that it waits for."""
        slow = self._slow
        return f": {slow.text}" if slow is not None and slow.id in self._pending and slow.id <= work.id else ""

    def poll(self, work: Work) -> None:
        """Take in what is there, unless another thread reads."""
        self._check_process()
        self._step(work, 0)
        self._look()

    def _look(self) -> None:
        """At what goes from and to devices.

        An input that will never be there ends the connection: the others go on without this member.
        """
        try:
            for work in self.pending:
                placement = work.placement  # another thread may be finishing it
                if placement is not None:
                    placement.look()
        except DeviceError as bad:
            bad.hint = "an operation was under way, so this member has left; " + (bad.hint or "connect again")
            self._over = self._over or as_failure(bad)
            self._channel.shutdown()  # wakes a thread that reads

    def _step(self, work: Work | _AnyOf | None, timeout: float | None) -> None:
        """Read the socket once, or, while another thread reads, wait until it has; nothing if *work* is finished."""
        # A Condition would be shorter, but it is written in Python: a Ctrl-C inside its __exit__ leaves it locked.
        mine, follower = False, threading.Lock()
        try:
            with self._turn:
                if work is not None and work.finished:
                    return
                if self._reading:
                    follower.acquire()
                    self._followers.append(follower)
                else:
                    self._reading = mine = True
            if not mine:
                follower.acquire(timeout=_FOLLOW_SECONDS if timeout is None else min(timeout, _FOLLOW_SECONDS))
            elif self._over is None:
                seconds = _READ_SECONDS if timeout is None else min(timeout, _READ_SECONDS)
                self._channel.receive(self._handle, seconds, self._pending)
            else:
                self._end(self._over)  # whoever came first may have been interrupted
        except WancollError as bad:
            self._end(as_failure(bad))
        finally:
            if mine:
                self._reading = False
                with self._turn:
                    followers, self._followers = self._followers, []
                for each in followers:
                    each.release()

    def _handle(self, message: Any) -> None:
        """One message of the daemon. May see a message twice if it was interrupted."""
        if isinstance(message, m.Result) or (isinstance(message, m.Failure) and message.id):
            work = self._pending.get(message.id)
            if work is not None:
                if isinstance(message, m.Result) and message.prepared:
                    self._channel.ring.learn(work.descriptor, message)
                work.finish(message)
                self._pending.pop(message.id, None)
        elif isinstance(message, m.Slow):
            self._slow = message
        elif isinstance(message, m.EpochInfo):
            if hasattr(self, "place"):
                gone = sorted(set(self.place.members) - set(message.members))
                self.partings |= {name: Parting(message.reason, name not in message.goodbyes) for name in gone}
                while len(self.partings) > DEFAULT.group_members:
                    del self.partings[next(iter(self.partings))]
            self.place = message
        elif isinstance(message, m.Failure):
            self._end(message)
        else:
            raise ProtocolError(
                "sent a message out of place", who=self._channel.who, expected="Result, Failure, Slow or EpochInfo",
                got=type(message).__name__,
            )  # fmt: skip

    # ---- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Detach, end what is pending as OutcomeUnknown, stop a private daemon. Safe to call again."""
        if os.getpid() != self._pid:
            return
        self.closed = True  # first: the daemon closes, too
        with contextlib.suppress(OSError):  # full or gone: closing says the same
            self._channel.send(encode(m.Detach()), [])
        self._over = self._over or as_failure(_closed(self.group))
        self._channel.shutdown()  # wakes a thread that reads
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._reading and (left := deadline - time.monotonic()) > 0:
            self._step(None, left)
        self._step(None, 0)
        posting = self._posting.acquire(timeout=max(0.0, deadline - time.monotonic()))  # who sends has the socket
        try:
            self._channel.close()
        finally:
            if posting:
                self._posting.release()
        self.staging.close()
        if self._private is not None:
            self._private.stop()

    def _end(self, why: m.Failure) -> None:
        """The connection is over. Only for the thread that reads. Doing it again is harmless.

        The daemon may still write to the blocks of pending calls, so no block is used again.
        """
        if self._over is None:
            self._over = self._private.explain(why) if self._private is not None else why
        self.arena.close()
        for work in self.pending:
            work.finish(cut_off(self._over, work.id, work.descriptor.kind))
            self._pending.pop(work.id, None)

    def watch(self, hook: Callable[[WancollError], object]) -> None:
        """Call *hook* from a thread when this connection ends but by close()."""
        if self._watch is not None:
            self._watch.close()
        self._watch = Watch(self._channel.socket, self.ended, hook)

    def ended(self) -> WancollError | None:
        """Why the daemon has closed the connection; None: it has not, or this process has."""
        if self.closed:
            return None
        while self._over is None:
            self._step(None, _LOOK_SECONDS)
        return rebuild(self._over)

    def check_usable(self) -> None:
        """Raise why this connection cannot be used, if so."""
        self._check_process()
        if self._over is not None:
            raise rebuild(self._over)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                "a communicator belongs to the process that connected",
                who=f"group {self.group!r}",
                expected=f"process {self._pid}",
                got=f"its child {os.getpid()}",
                hint="connect in the child, under another name",
            )

    def disown(self) -> None:
        """In a forked child: let go of everything, so that the parent's end is seen even while the child lives."""
        self._channel.close()
        if self._watch is not None:
            self._watch.close()
        self.staging.disown()
        self.arena.disown()


class _AnyOf:
    """Several calls, finished when one of them is."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    @property
    def finished(self) -> bool:
        return any(work.finished for work in self._works)


def deadline_after(timeout: float | None) -> float | None:
    """The time.monotonic() that is *timeout* seconds from now; None: never."""
    return None if timeout is None or math.isinf(timeout) else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """Seconds until *deadline*, at least 0; None: no limit."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _closed(group: str) -> ConfigError:
    return ConfigError(
        "the communicator is closed", who=f"group {group!r}", hint="connect again to rejoin as a new member"
    )

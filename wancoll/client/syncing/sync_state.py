"""sync_state: members compare what they hold and fetch what differs, with the collectives and sends that there are.

    step        what happens                                                next
    headers     all_gather of fixed size                                    all alike -> end; else contents
    contents    all_gather of keys and digests; all decide the same         memory is taken -> reports
    reports     all_gather of what each member lacks                        nothing -> put in place, end; else round
    round       deliveries: sends and recvs of stripes, all in one order    reports

What is decided is decided in wancoll.sync, from what was gathered, by all members alike.

Nothing of the caller's is touched before the gather that says that nobody lacks anything: it commits on all or none.
But for who overwrites: what is missing in its main memory is received there, round by round.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from wancoll.client.checks import check_seconds
from wancoll.client.connection import Connection, deadline_after, seconds_left
from wancoll.client.cuda.staging import HostToDevice
from wancoll.client.memory.placement import Placement
from wancoll.client.memory.tensors import Region
from wancoll.client.syncing.state import Incoming, Tensor, content, digests, worthless
from wancoll.client.syncing.things import Things
from wancoll.client.work import Work
from wancoll.collective import LIBRARY_TAGS, Descriptor, DType, Kind, Receipt
from wancoll.errors import (
    ArenaFull,
    ConfigError,
    DeviceError,
    OperationAborted,
    ProtocolError,
    TimeoutError,
    WancollError,
)
from wancoll.sync.manifest import Header, decode, encode, fingerprint, pack_header, unpack_header
from wancoll.sync.receipt import SyncReceipt
from wancoll.sync.rounds import Delivery, RoundReport, decode_report, encode_report, next_round
from wancoll.sync.strategy import OVERWRITE, SEND_ONLY
from wancoll.sync.verdict import Goal, Verdict, goal, judge

_AHEAD = 3  # deliveries under way for each partner
_MOST = 32  # deliveries under way
_GATHERS_OF_ISLANDS = 3  # of reports: columns that lack more and less have to make the same calls
_TORN = "this member's tensors, which it overwrites, hold a part of another state"

Waits = Generator[Sequence[Work], None, Any]  # yields calls; goes on when one of them is finished


class SyncWork:
    """Handle of a sync_state that was not finished in time."""

    def __init__(
        self, all_gather: Callable[..., Work], connection: Connection, tensors: list[Tensor], revision: int,
        strategy: str, on_failure: str, deadline: float | None = None, things: Things | None = None,
    ) -> None:  # fmt: skip
        self._turn = threading.Lock()  # one thread at a time goes on with it
        self._deadline = deadline  # of devices
        self._stalled = False  # a device did not hand a stripe over by then
        self._to_devices: list[HostToDevice] = []
        self._won: Goal | None = None  # which the things have not been told
        self._began = time.monotonic()
        self._all_gather, self._connection, self._on_failure = all_gather, connection, on_failure
        self._tensors, self._things = tensors, things
        connection.check_usable()
        regions = tuple(tensor.memory for tensor in tensors if tensor.memory.nbytes)
        targets = regions if strategy != SEND_ONLY else ()
        touched = Placement(connection.arena, regions, targets, staging=connection.staging)
        connection.check_free(touched, "sync_state(state)", "tensors that no pending call uses")
        self._overwrites = strategy == OVERWRITE
        if self._overwrites and all(tensor.memory.device is None for tensor in tensors):
            self._content = worthless(tensors)
        else:
            self._content = content(tensors, connection.staging, deadline)  # kernels that use them are done then
        if things is not None:
            self._content = replace(self._content, things=things.described)
        self._encoded = encode(self._content)
        self._header = Header(revision, strategy, fingerprint(self._encoded), len(self._encoded))
        self._incoming: Incoming | None = None
        self._members: tuple[str, ...] = ()  # of the first gather
        self._missing: set[int] = set()
        self._bad: set[str] = set()
        self._received = self._sent = self._repeated = self._rounds = 0
        self._answer: SyncReceipt | WancollError | None = None
        self._steps: Generator[Sequence[Work], None, SyncReceipt] = self._run()
        self._waits: Sequence[Work] = ()

    def wait(self, timeout: float | None = None) -> SyncReceipt:
        """Block until all members have the state that won, or none has been changed but who overwrites its own.

        Args:
            timeout: seconds; None waits as long as it takes.

        Returns:
            The receipt, each time.

        Raises:
            TimeoutError: still pending; nothing is lost, wait() again. Its .work is this handle.
            DeviceError: a device failed.
            WancollError: it failed; the tensors are as they were, or the hint says that they hold a mixture.
        """
        check_seconds("sync_state", "timeout", timeout)
        deadline = deadline_after(timeout)
        left = seconds_left(deadline)
        if not self._turn.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
            raise self._late()  # another thread goes on with it
        try:
            return self._wait(deadline)
        finally:
            self._turn.release()

    def _wait(self, deadline: float | None) -> SyncReceipt:
        self._deadline = deadline
        while self._answer is None:
            left = seconds_left(deadline)
            if self._waits and not self._connection.wait_any(self._waits, left):
                raise self._late()
            if self._stalled and left == 0:
                raise self._late()
            self._step()
        if isinstance(self._answer, WancollError):
            if self._torn and _TORN not in self._answer.hint:
                rest = self._answer.hint.replace("all tensors are", "the others' tensors are")
                self._answer.hint = f"{_TORN}: call sync_state again; {rest}".rstrip("; ")
            raise self._answer
        for to_device in self._to_devices:
            try:
                self._connection.staging.order(to_device, seconds_left(deadline))
            except TimeoutError as late:
                late.work = self
                raise
        if self._things is not None and self._won is not None:
            won, self._won = self._won, None
            try:
                self._things.load(won, won.missing[self._connection.place.member])
            except WancollError as bad:
                self._answer = bad
                raise
        return self._answer

    @property
    def _torn(self) -> bool:
        """Whether bytes of the state that won may have come into the caller's tensors."""
        return self._overwrites and self._rounds > 0

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"sync_state of group {self._connection.group!r}, member {self._connection.place.member!r}, is still "
            f"pending {time.monotonic() - self._began:.3f} s after it was called",
            hint=(f"{_TORN}; " if self._torn else "nothing is lost: ") + ".work.wait() goes on waiting",
            work=self,
        )

    def _step(self) -> None:
        """Go on until there is something to wait for."""
        try:
            self._waits = next(self._steps)
            return
        except StopIteration as end:
            self._answer = end.value
        except WancollError as bad:
            self._answer = bad
        except BaseException as bad:
            self._answer = OperationAborted(
                "was interrupted, and cannot go on", who="sync_state", got=repr(bad),
                hint="close the communicator, so that the others need not wait for this member",
            )  # fmt: skip
            raise
        finally:
            if self._answer is not None and self._incoming is not None:
                self._connection.arena.cool(self._incoming.nbytes)
                self._incoming = None  # deliveries that are still under way, after an interruption, hold it

    # ---- the steps -----------------------------------------------------------------------------------

    def _run(self) -> Generator[Sequence[Work], None, SyncReceipt]:
        receipt, headers = yield from self._gather_headers()
        verdict = judge(headers)
        islands = self._connection.shards > 1
        if not verdict.differing and not islands:
            return self._finished(receipt, verdict, None)
        receipt, contents = yield from self._gather_contents(headers)
        headers = {name: headers[name] for name in receipt.contributors}
        verdict = judge(headers)
        found = goal(verdict, headers, {name: decode(data, name) for name, data in contents.items()})
        self._members = receipt.contributors
        problem = self._make_room(found)
        for gathers in itertools.count(1):
            receipt, reports = yield from self._gather_reports(found, problem)
            deliveries = next_round(found, reports)
            if gathers == _GATHERS_OF_ISLANDS if islands else not deliveries:
                break
            self._rounds += bool(deliveries)
            yield from self._move(found, deliveries, receipt.seq)
        if deliveries:
            raise OperationAborted(
                "could not be ended in as many rounds as islands have for it", who="sync_state",
                expected=f"at most {_GATHERS_OF_ISLANDS - 1}", got="members were lost in each",
                hint="call sync_state again; all tensors are as they were",
            )  # fmt: skip
        if self._incoming is not None:
            try:
                self._incoming.install()
            except DeviceError as bad:
                bad.hint = "the state is committed; this member's tensors have undefined contents"
                raise
            self._to_devices = self._incoming.to_devices
        self._won = found
        return self._finished(receipt, verdict, found)

    def _finished(self, receipt: Receipt, verdict: Verdict, found: Goal | None) -> SyncReceipt:
        changed: dict[str, list[int]] = {}
        nbytes = 0
        if found is not None:
            changed = {name: found.tensors(found.missing[name]) for name in receipt.contributors}
            nbytes = sum(found.nbytes(found.missing[name]) for name in receipt.contributors)
        mine = changed.get(self._connection.place.member, [])
        return SyncReceipt(
            revision=verdict.revision,
            holders=verdict.holders,
            tensors=tuple(self._tensors[number].entry.key for number in mine),
            bytes_received=self._received,
            bytes_sent=self._sent,
            bytes_repeated=self._repeated,
            tensors_moved=sum(map(len, changed.values())),
            bytes_moved=nbytes,
            contributors=receipt.contributors,
            epoch=receipt.epoch,
            rounds=self._rounds,
            seconds=time.monotonic() - self._began,
        )

    def _make_room(self, found: Goal) -> str:
        """Take memory for what is missing here; says why that is not possible."""
        missing = found.missing[self._connection.place.member]
        self._missing = set(missing)
        try:
            if self._things is not None:
                self._tensors = self._things.fit(found, self._tensors)
            if self._overwrites:  # what takes the bytes on their way to a device is taken anyway
                missing = frozenset(each for each in missing if self._memory(found, each).device is not None)
            if not missing:
                return ""
            self._incoming = Incoming(self._connection.arena, self._connection.staging, found, missing, self._tensors)
        except (ArenaFull, ProtocolError, MemoryError) as bad:
            return str(bad) or repr(bad)
        return ""

    # ---- gathers -------------------------------------------------------------------------------------

    def _gather(self, data: bytes, counts: Mapping[str, int] | None = None) -> Waits:
        """(receipt, what each contributor gave)."""
        names = self._connection.place.members
        sizes = None if counts is None else [counts.get(name, 0) for name in names]
        work = self._all_gather(np.frombuffer(data, np.uint8), counts=sizes, async_op=True, on_failure=self._on_failure)
        while not work.finished:
            yield (work,)
        receipt = work.wait()
        ends = [*itertools.accumulate(len(data) if counts is None else counts[name] for name in receipt.contributors)]
        flat = receipt.out.reshape(-1).tobytes()
        starts = [0, *ends[:-1]]
        return receipt, {
            name: flat[start:end] for name, start, end in zip(receipt.contributors, starts, ends, strict=True)
        }

    def _gather_headers(self) -> Waits:
        receipt, found = yield from self._gather(pack_header(self._header))
        self._members = receipt.contributors
        return receipt, {name: unpack_header(data, name) for name, data in found.items()}

    def _gather_contents(self, headers: Mapping[str, Header]) -> Waits:
        receipt, found = yield from self._gather(
            self._encoded, {name: header.nbytes for name, header in headers.items()}
        )
        self._check_left(receipt)
        return receipt, found

    def _gather_reports(self, found: Goal, problem: str) -> Waits:
        count = len(found.stripes)
        mine = RoundReport(frozenset(self._missing), frozenset(self._bad), problem)
        receipt, said = yield from self._gather(encode_report(mine, count, self._members))
        self._check_left(receipt)
        return receipt, {name: decode_report(data, count, self._members, name) for name, data in said.items()}

    def _check_left(self, receipt: Receipt) -> None:
        lost = [name for name in self._members if name not in receipt.contributors]
        if lost and self._on_failure == "raise":
            raise OperationAborted(
                "the membership changed", who="sync_state", expected=f"all of {', '.join(self._members)}",
                got=f"{', '.join(lost)} left or was lost", hint="all tensors are as they were",
            )  # fmt: skip

    # ---- a round -------------------------------------------------------------------------------------

    def _move(self, found: Goal, deliveries: Sequence[Delivery], seq: int) -> Waits:
        """Post this member's deliveries in the order of the plan, a bounded number at a time."""
        me = self._connection.place.member
        mine = deque((i, each) for i, each in enumerate(deliveries) if me in (each.sender, each.receiver))
        partners = {name for _, each in mine for name in (each.sender, each.receiver)}
        most = min(_MOST, _AHEAD * (len(partners) - 1))
        flying: dict[Work, Delivery] = {}
        while mine or flying:
            while mine and len(flying) < most:
                index, delivery = mine[0]
                tag = LIBRARY_TAGS | (seq & 0xFFFFFFF) << 28 | index & 0xFFFFFFF
                try:
                    work = self._post(found, delivery, tag)
                except ArenaFull:
                    if flying:
                        break  # what they hold comes back
                    work = self._post(found, delivery, tag, refuse=True)
                except TimeoutError:
                    self._stalled = not flying
                    break
                except (ConfigError, DeviceError):  # a tensor on a device was freed, or the device fails
                    work = self._post(found, delivery, tag, refuse=True)
                self._stalled = False
                mine.popleft()
                if work is not None:
                    flying[work] = delivery
            if flying or self._stalled:
                yield tuple(flying)
            for work in [each for each in flying if each.finished]:
                self._ended(found, work, flying.pop(work))

    def _post(self, found: Goal, delivery: Delivery, tag: int, refuse: bool = False) -> Work | None:
        """Get one under way; None: the other side is gone.

        With *refuse* this side cannot take part: it calls it with another size, which ends it on both sides.
        """
        place = self._connection.place
        sends = delivery.sender == place.member
        other = delivery.receiver if sends else delivery.sender
        if other not in place.members:
            return None
        parts = () if refuse else tuple(self._region(found, number) for number in delivery.stripes)
        if not sends and self._incoming is not None:
            self._incoming.fill(delivery.stripes)
        nbytes = sum(part.nbytes for part in parts)
        kind = Kind.send if sends else Kind.recv
        arena = self._connection.arena
        built = not sends and len(parts) == 1 and arena.find(parts[0].address, nbytes) is not None  # it need not move
        placement = Placement(
            arena, parts if sends else (), () if sends else parts, fresh=built, staging=self._connection.staging,
        )  # fmt: skip
        work = Work(
            self._connection, Descriptor(kind, DType.uint8, count=nbytes), place.epoch, placement,
            parts[0] if not sends and len(parts) == 1 else None, peer=place.members.index(other), tag=tag,
        )  # fmt: skip
        self._connection.post(work, self._deadline)
        return work

    def _region(self, found: Goal, number: int) -> Region:
        """Where a stripe lies here: where it is received, or in the caller's tensor."""
        stripe = found.stripes[number]
        address = self._incoming.address(number) if self._incoming is not None else None
        if address is not None:
            return Region(None, self._incoming, address, stripe.nbytes, DType.uint8, (stripe.nbytes,), True)
        return self._memory(found, number).part(stripe.offset, stripe.nbytes)

    def _memory(self, found: Goal, number: int) -> Region:
        return self._tensors[found.stripes[number].entry].memory

    def _ended(self, found: Goal, work: Work, delivery: Delivery) -> None:
        sends = work.descriptor.kind is Kind.send
        try:
            receipt = work.wait()
        except WancollError:  # whatever it is: the next gather fails, too, or another member can do it
            self._bad.add(delivery.receiver if sends else delivery.sender)
            self._repeated += delivery.nbytes
            return
        self._repeated += (receipt.attempts - 1) * delivery.nbytes
        if sends:
            self._sent += delivery.nbytes
            return
        if len(delivery.stripes) == 1:
            right = [int(receipt.digest, 16) == found.digest(delivery.stripes[0])]
        else:
            regions = [self._region(found, number) for number in delivery.stripes]
            made = digests([(region.address, region.nbytes) for region in regions])
            right = [digest == found.digest(number) for digest, number in zip(made, delivery.stripes, strict=True)]
        for number, good in zip(delivery.stripes, right, strict=True):
            if good:
                self._missing.discard(number)
                self._received += found.stripes[number].nbytes
            else:
                self._bad.add(delivery.sender)

"""The copies between tensors of devices and the arena: what is copied, in which order, and who waits for whom.

    before reading     our stream waits for the tensor's stream, or the tensor's owner orders it (DLPack)
    a codec            of the call encodes on the device first, and decodes there last (coded.py), where it has kernels
    reading            device -> input, in pieces, first those that the schedule needs first; the call is posted at once
    a piece is there   the driver calls wc_fill_told (native/fill.h) in a thread of its own: the engine may use it
    before the commit  what is final goes to memory of ours on the device (eager_copy.py)
    after the commit   our other stream waits for the tensor's stream; back -> device; the tensor's stream waits for it
    wait()             so does the stream that is the caller's then; where no stream is known the host waits

So nobody has to wait for a device, neither the caller nor a thread of ours, and the network has the first pieces while
the others are still on their way. The calls of the driver wait in a stream of their own: copies do not wait for them.
Only what the host changes first (feedback of a codec without kernels), and what cannot be pinned, it waits for.

A block of the arena is used again when the copies from and to it are done. Nothing waits without end for a device: the
host looks at marks, with a deadline, and our streams wait for streams of the caller only, never for the network.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from wancoll.client.codecs import Feed, Residual, coded_bytes
from wancoll.client.cuda.coded import LEAST as CODED_LEAST
from wancoll.client.cuda.coded import CodedResult, NoRoom, OnDevice, encode, loaded
from wancoll.client.cuda.driver import TO_DEVICE, TO_HOST, Copy, Device, Driver, Mark, Memory, driver, until
from wancoll.client.cuda.eager_copy import LEAST, EagerCopy, Numbers, Queued
from wancoll.client.cuda.encode import CODECS
from wancoll.client.cuda.origin import Origin
from wancoll.client.cuda.pinned import Pinned, Pool
from wancoll.client.cuda.stream_wait import StreamWaits, Words, check_may_wait, hold, stream_of
from wancoll.client.memory.arena import Arena, Lease
from wancoll.client.memory.tensors import DeviceView, Region
from wancoll.collective import Codec
from wancoll.errors import ConfigError, DeviceError, TimeoutError
from wancoll.limits import BLOCK, DEFAULT, MIB, blocks, format_size
from wancoll.native import ffi, lib

log = logging.getLogger("wancoll")

PIECE = 4 * MIB  # of an input, told as one
LARGE = 16 * MIB  # of what nobody waits for in pieces: other copies come in between
_CLOSE_SECONDS = 5.0  # close() waits this long for copies that are under way
_UNPINNED_SECONDS = 60.0  # a commit waits this long for a tensor's stream, where nothing could be pinned


@dataclass(frozen=True, slots=True)
class HostToDevice:
    """A result on its way to a device, and how its users are ordered."""

    device: Device
    mark: Mark
    origin: Origin


@dataclass(slots=True)
class DeviceToHost:
    """An input on its way from devices."""

    table: Lease  # a byte for each BLOCK of it, see Post.filled
    calls: Any  # what the driver calls with
    pieces: list[Piece]  # in their order
    mark: Mark | None = None  # behind the last call; None: an error came before, so nobody knows when it will be over

    def over(self) -> bool:
        """Whether the driver uses it no more."""
        try:
            return self.mark is not None and self.mark.ready()
        except DeviceError:
            return False


class Piece(NamedTuple):
    """Bytes [start, start + nbytes) of an input's elements; *copy* brings them from the device *on* to the arena."""

    start: int
    nbytes: int
    copy: Copy
    on: int

    @property
    def blocks(self) -> tuple[int, int]:
        """[first, stop) of the input's blocks that it has a part of."""
        return self.start // BLOCK, blocks(self.start + self.nbytes)


def ordered(found: list[Piece], nbytes: int, share: tuple[int, int]) -> list[Piece]:
    """Pieces of *nbytes* bytes as a ring needs them that begins with a share: that one, then those before it, around.

    They are given by start; *share* is its number, and how many there are.
    """
    mine, shares = share

    def turn(piece: Piece) -> int:
        first, last = (at * shares // nbytes for at in (piece.start, piece.start + piece.nbytes - 1))
        return 0 if first <= mine <= last else (mine - last) % shares

    return sorted(found, key=turn)


def told_by(found: list[Piece]) -> list[tuple[int, int]]:
    """For each piece the blocks, [first, stop), that are there once it and those before it are."""
    last = {}  # of the blocks at the ends of pieces: the last piece that has a part of them
    ends = [piece.blocks for piece in found]
    for number, (first, stop) in enumerate(ends):
        last[first] = last[stop - 1] = number
    return [
        (first + (last[first] != number), max(stop - (last[stop - 1] != number), first + (last[first] != number)))
        for number, (first, stop) in enumerate(ends)
    ]


def pieces(nbytes: int, most: int = PIECE) -> list[tuple[int, int]]:
    """(start, size) of the pieces in which so many bytes are copied."""
    return [(start, min(most, nbytes - start)) for start in range(0, nbytes, most)]


class Staging:
    """The copies of one connection. Any number of threads may use it. Without tensors of devices it loads nothing."""

    _pid = 0  # where an interruption leaves it half made

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.RLock()
        self._driver: Driver | None = None
        self._devices: dict[int, Device] = {}
        self._pool: Pool | None = None
        self._words: Words | None = None
        self._to_hosts: list[DeviceToHost] = []  # that the driver may still use
        self._closed = self._warned = False
        self._pid = os.getpid()

    # ---- looking at tensors --------------------------------------------------------------------------

    def check(self, regions: Iterable[Region]) -> None:
        """Refuse tensors of devices whose memory cannot be used.

        Raises:
            ConfigError: so it is, or there is no driver.
            DeviceError: the driver fails.
        """
        for region in dict.fromkeys(regions):
            if region.nbytes and region.device is not None:
                with self._lock:
                    self._check(region)
            elif region.nbytes and region.pinned is not None:
                with self._lock:
                    self._use(f"pinned memory, {region}")

    def _use(self, who: str) -> Driver:
        if self._closed:
            raise ConfigError("the communicator is closed", who=who)
        self._driver = driver(who)  # refuses if it is another process's by now
        return self._driver

    def _check(self, region: Region) -> None:
        assert region.device is not None
        who = f"a CUDA tensor {region}"
        call = self._use(who)
        kind = call.api.CUpointer_attribute
        wanted = [
            kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, kind.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            kind.CU_POINTER_ATTRIBUTE_CONTEXT, kind.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            kind.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ]  # fmt: skip
        memory, ordinal, context, start, size = call("cuPointerGetAttributes", len(wanted), wanted, region.address)
        if not int(memory):
            raise ConfigError(
                "the tensor's memory is unknown to this process's CUDA driver", who=who,
                expected="memory of a device, of this process", got=f"address {region.address:#x}",
                hint="it was freed, or belongs to another process",
            )  # fmt: skip
        end = int(start) + int(size)
        if int(size) and not int(start) <= region.address <= region.address + region.nbytes <= end:
            raise ConfigError(
                "the tensor goes beyond the memory that it lies in", who=who,
                expected=f"at most {end - region.address} bytes", got=str(region.nbytes),
            )  # fmt: skip
        device = self._device(int(ordinal) if int(ordinal) >= 0 else region.device.ordinal or 0)
        if int(context) and int(context) != int(device.context):
            raise ConfigError(
                "the tensor belongs to another CUDA context", who=who,
                expected=f"the primary context of cuda:{device.ordinal}", got=f"context {int(context):#x}",
                hint="allocate it in the primary context, which torch, CuPy, JAX and Numba use",
            )  # fmt: skip
        region.on = device.ordinal

    def _device(self, ordinal: int) -> Device:
        assert self._driver is not None
        found = self._devices.get(ordinal)
        if found is None:
            found = self._devices[ordinal] = Device(self._driver, ordinal, self._lock)
        return found

    def new(self, shape: tuple[int, ...], like: Region) -> Region:
        """A tensor of like's dtype on its device, for users of any library, on like's stream if that lasts.

        Raises:
            ConfigError: like's memory cannot be used, or there is no driver.
            DeviceError: the device has no memory for it.
        """
        self.check([like])
        assert like.device is not None
        count, stream = prod(shape), like.device.lasting
        ordinal = like.on if like.on >= 0 else like.device.ordinal or 0
        memory = None
        if count:
            memory = Memory(self._use(f"a CUDA tensor {like}"), ordinal, count * like.dtype.itemsize)
        address = memory.address if memory is not None else 0
        view = DeviceView(memory, address, shape, like.dtype, stream)
        return Region(view, None, address, count, like.dtype, shape, True, Origin(ordinal, stream))

    # ---- blocks --------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Lease | Pinned:
        """A block of the arena, pinned if that can be. Raises ArenaFull: there is no room."""
        with self._lock:
            if self._pool is None:
                self._pool = Pool(self._arena, DEFAULT.pinned_bytes, self._register, self._unregister)
            got = f"{format_size(self._pool.nbytes)} of {format_size(DEFAULT.pinned_bytes)} are pinned"
            try:
                held = self._pool.take(nbytes)
            except DeviceError as bad:
                held, got = None, bad.got
            if held is not None:
                return held
            if not self._warned:
                self._warned = True
                log.warning("%s cannot be pinned (%s): copies from and to devices block", format_size(nbytes), got)
        return self._arena.take(nbytes)

    def take_coded(self, codec: Codec, parts: Sequence[Region]) -> Pinned | None:
        """A pinned block for the parts of one tensor, if their device can encode and decode them."""
        if codec not in CODECS or sum(part.nbytes for part in parts) < CODED_LEAST:
            return None
        if any(part.device is None or part.on != parts[0].on for part in parts):
            return None
        device = self._devices[parts[0].on]
        with self._lock, device.current():
            held = self.take(coded_bytes(codec, sum(part.count for part in parts))) if loaded(device) else None
        return held if isinstance(held, Pinned) else None

    def _register(self, address: int, nbytes: int) -> None:
        assert self._driver is not None
        with next(iter(self._devices.values())).current():
            self._driver("cuMemHostRegister", address, nbytes, self._driver.api.CU_MEMHOSTREGISTER_PORTABLE)

    def _unregister(self, address: int) -> None:
        assert self._driver is not None
        with next(iter(self._devices.values())).current():
            self._driver("cuMemHostUnregister", address)

    # ---- pinned memory of the caller's --------------------------------------------------------------

    def within(self, regions: Iterable[Region]) -> AbstractContextManager[None]:
        """While this is entered, the context of the first device of these is the thread's: it is not changed often."""
        found = [each.on for each in regions if each.nbytes and each.device is not None]
        return self._devices[found[0]].current() if found else nullcontext()

    def settle(self, region: Region, deadline: float | None) -> None:
        """Wait until a device's users of memory of the host that were queued so far are done.

        Raises:
            TimeoutError: they are not, by *deadline*.
            DeviceError: the device fails.
        """
        origin = region.pinned
        order = origin.order if origin is not None else None
        if origin is None or order is None or not region.nbytes:
            return
        with self._lock:
            device = self._device(origin.ordinal or 0)
            with device.current():
                stream = device.lend()
                try:
                    order(int(stream))
                except (TypeError, ValueError, BufferError):  # it takes no stream for such memory: it has none
                    device.give_back(stream)
                    return
                mark = device.mark(stream)
                device.give_back(stream, mark)
        region.on = device.ordinal
        self._until(mark, deadline, region)

    # ---- from a device -------------------------------------------------------------------------------

    def read(self, source: Region, to: int, held: Lease | Pinned, deadline: float | None) -> None:
        """Copy a tensor to *to*, in the block that is *held*; returns when it is there.

        Raises:
            TimeoutError: it is not, by *deadline*.
            DeviceError: the device fails.
        """
        if not source.nbytes:
            return
        assert self._driver is not None
        device = self._devices[source.on]
        pinned = held if isinstance(held, Pinned) else None
        with self._lock, device.current():
            self._come_behind(device, source)
            ready = device.mark(device.inward) if pinned is None else None
        if pinned is None:
            assert ready is not None
            self._until(ready, deadline, source)
            for start, size in pieces(source.nbytes):
                with self._lock, device.current():
                    self._driver("cuMemcpyDtoH", to + start, source.address + start, size)
            return
        copies = [(TO_HOST, to + start, source.address + start, size) for start, size in pieces(source.nbytes, LARGE)]
        with self._lock, device.current():
            mark = self._queue(pinned, device, device.inward, copies)
            pinned.entry.marks.append(mark)
        self._until(mark, deadline, source)

    def fill(
        self, sources: Sequence[tuple[int, Region]], nbytes: int, held: Pinned, share: tuple[int, int]
    ) -> DeviceToHost:
        """Queue the copies of tensors of devices, each with its place in the input, to its block; returns at once.

        The input's *nbytes* lie at the begin of what is *held*; those of no tensor are there already. *share*: see
        ordered.

        Raises:
            ArenaFull: there is no room.
            DeviceError: the device fails.
        """
        to = held.block.address
        found = [
            Piece(at + start, size, (TO_HOST, to + at + start, source.address + start, size), source.on)
            for at, source in sources
            for start, size in pieces(source.nbytes)
        ]
        to_host = self._told(found, nbytes, share)
        with self._lock:
            for _, source in sources:
                device = self._devices[source.on]
                with device.current():
                    self._come_behind(device, source)
            self._queue_to_host(to_host, held)
        return to_host

    def encode(
        self, codec: Codec, sources: Sequence[Region], held: Pinned, share: tuple[int, int], feed: Feed | None
    ) -> DeviceToHost | None:
        """Do as fill() with the parts of a tensor, which its device encodes; None: it has no memory for that.

        Raises:
            ArenaFull: there is no room.
            DeviceError: the device fails.
        """
        nbytes, dtype, device = sum(each.nbytes for each in sources), sources[0].dtype, self._devices[sources[0].on]
        at_once = PIECE // coded_bytes(codec, BLOCK // dtype.itemsize) * BLOCK
        with self._lock, device.current():
            for source in sources:
                self._come_behind(device, source)
            try:
                residual = self._upload(device, feed.residual()) if feed is not None else None
                coded = encode(device, codec, sources, feed, residual)
            except NoRoom:
                return None
            try:
                found = []
                for start, size in pieces(nbytes, at_once):
                    at, end = (coded_bytes(codec, each // dtype.itemsize) for each in (start, start + size))
                    copy = TO_HOST, held.block.address + at, coded + at, end - at
                    found.append(Piece(start, size, copy, device.ordinal))
                to_host = self._told(found, nbytes, share)
                self._queue_to_host(to_host, held)
            finally:
                device.leave_memory(coded, device.inward)
        return to_host

    def _upload(self, device: Device, residual: Residual | None) -> OnDevice | None:
        """The residual on this device."""
        if residual is None or (isinstance(residual, OnDevice) and residual.device is device):
            return residual
        array, held = np.asarray(residual), self.take(residual.nbytes)
        if not isinstance(held, Pinned):
            raise NoRoom("no memory could be pinned", who=f"cuda:{device.ordinal}")
        found = OnDevice(device, array.size, array.dtype)
        lib.wc_pages_copy(held.block.address, array.ctypes.data, array.nbytes, 0)
        copy = TO_DEVICE, found.address, held.block.address, array.nbytes
        held.entry.marks.append(self._queue(held, device, device.inward, [copy]))
        return found

    def _told(self, found: list[Piece], nbytes: int, share: tuple[int, int]) -> DeviceToHost:
        """What tells of the pieces of an input, as they come."""
        table = self._arena.take(blocks(nbytes))
        found = ordered(found, nbytes, share)
        ranges = told_by(found)
        filled = bytearray(b"\1" * blocks(nbytes))
        for piece in found:
            first, stop = piece.blocks
            filled[first:stop] = bytes(stop - first)
        ffi.memmove(ffi.cast("char *", table.block.address), filled, len(filled))
        calls = ffi.new("wc_fill[]", [(table.block.address, *each, self._arena.bell) for each in ranges])
        return DeviceToHost(table, calls, found)

    def _come_behind(self, device: Device, source: Region) -> None:
        """What is copied from the device from now on comes behind the work of the tensor's users."""
        assert source.device is not None
        self._after_its_users(device, device.inward, source.device)
        if device.last is not None:  # an earlier result for it, of which no stream knows
            device.follow_mark(device.inward, device.last)

    def _queue_to_host(self, to_host: DeviceToHost, held: Pinned) -> None:
        """Each device copies its pieces; the first one's stream of calls follows all of them, piece by piece.

        A piece that is alone does without that stream.
        """
        assert self._driver is not None
        self._to_hosts = [each for each in self._to_hosts if not each.over()]
        self._to_hosts.append(to_host)
        found = to_host.pieces
        devices = {piece.on: self._devices[piece.on] for piece in found}
        teller = devices[found[0].on]
        telling = teller.telling if len(found) > 1 else teller.inward
        held.entry.unmarked += 1  # and stays so if an error leaves copies without a mark
        told, call = ffi.cast("uintptr_t", ffi.addressof(lib, "wc_fill_told")), to_host.calls
        for number, piece in enumerate(found):
            device = devices[piece.on]
            with device.current():
                device.queue(piece.copy, device.inward)
                if len(found) > 1:
                    device.follow(telling, device.inward)
            with teller.current():
                with_ = int(ffi.cast("uintptr_t", ffi.addressof(call, number)))
                self._driver("cuLaunchHostFunc", telling, self._driver.api.CUhostFn(int(told)), with_)
        with teller.current():
            to_host.mark = teller.mark(telling)
        held.entry.marks.append(to_host.mark)  # behind all copies
        held.entry.unmarked -= 1

    def filled(self, to_host: DeviceToHost) -> bool:
        """Whether the input is there. Raises DeviceError: it will not be: a device failed."""
        with self._lock:
            return to_host.mark is None or to_host.mark.ready()

    def _until(self, mark: Mark, deadline: float | None, source: Region) -> None:
        if not self._reached(mark, deadline):
            raise TimeoutError(
                "the device did not hand the tensor over in time; nothing was sent", who=f"cuda:{source.on}, {source}",
                hint="kernels that were queued before it are not finished",
            )  # fmt: skip

    # ---- to a device ---------------------------------------------------------------------------------

    def expect(self, target: Region) -> None:
        """A result will be written into the tensor: its users so far come first, where nobody can be asked later."""
        if target.device is not None and target.nbytes and target.device.lasting is None:
            device = self._devices[target.on]
            with self._lock, device.current():
                self._after_its_users(device, device.outward, target.device)

    def early(self, targets: Iterable[Region]) -> list[EagerCopy | None]:
        """For each target what may go to its device before the commit."""
        found: list[EagerCopy | None] = []
        start = 0
        for each in targets:
            worth = each.device is not None and each.nbytes >= LEAST
            found.append(EagerCopy(self._devices[each.on], start, each.nbytes) if worth else None)
            start += each.nbytes
        return found

    def expect_coded(self, codec: Codec, targets: Sequence[Region], held: Pinned) -> EagerCopy | None:
        """What brings an encoded result to the parts of a tensor; None: the device has no memory for it."""
        device = self._devices[targets[0].on]
        early = CodedResult(device, codec, targets)
        early.over = early.nbytes < LEAST
        with self._lock, device.current():
            if not early.take():
                return None
            held.entry.unmarked += 1  # see begin()
        return early

    def begin(self, early: EagerCopy, words: Numbers, held: Pinned) -> bool:
        """Queue the copies of what is final by now, from the block that is *held*; whether there was anything."""
        device = early.device
        with self._lock:
            if early.over or self._closed or not early.final(words)[1]:
                return False
            began = early.stream is not None
            try:
                with device.current():
                    return early.begin(words, held.block.address)
            except DeviceError:  # whoever needs the device hears of it
                early.over = True
                return False
            finally:
                if not began and early.stream is not None:
                    held.entry.unmarked += 1  # until the last copy has a mark

    def end(self, early: EagerCopy, held: Pinned) -> None:
        """Nothing more is copied early; what was, and is not committed, is void. Safe to call again."""
        device = early.device
        with self._lock:
            stream = early.stop()
            if stream is not None and not self._closed:
                with suppress(DeviceError), device.current():
                    mark = self._queue(held, device, stream, [], early)
                    held.entry.marks.append(mark)
                    device.give_back(stream, mark)

    def write(
        self, targets: Sequence[Region], source: int, nbytes: int, held: Lease | Pinned,
        stream_waits: Callable[[], StreamWaits | None] = lambda: None,
        early: EagerCopy | None = None, attempt: int = 0, behind: Mark | None = None,
    ) -> list[HostToDevice]:  # fmt: skip
        """Queue the copy of a result from *source*, in the block that is *held*; none: it is done. In any thread.

        Streams of *stream_waits* wait for it already; it is asked for late, since another thread may have just made it.
        What *attempt* has made may have gone to the device *early*. Several targets are parts of one that is encoded.
        *behind*: what has to be done before.

        Raises:
            DeviceError: the device fails.
        """
        targets = [each for each in targets if each.nbytes]
        if not nbytes or not targets:
            return []
        assert self._driver is not None
        target, device = targets[0], self._devices[targets[0].on]
        origins = [each.device for each in targets if each.device is not None]
        lasting = {origin.lasting for origin in origins}
        with self._lock, device.current():
            if isinstance(held, Pinned):
                now = stream_waits()
                waiting = now.before[device.ordinal] if now is not None and not now.released else None
                ahead = early.stop() if early is not None else None
                if ahead is None and isinstance(early, CodedResult):  # an interruption came in between: once more
                    ahead = self._again(early, held)
                ours = ahead if ahead is not None else device.lend() if waiting is not None else device.outward
                if waiting is not None:
                    for before in waiting:
                        device.follow_mark(ours, before)
                else:
                    for stream in lasting:
                        if stream is not None:
                            device.follow(ours, stream)
                        elif ahead is not None:
                            device.follow(ours, device.outward)  # see expect()
                if behind is not None:
                    device.follow_mark(ours, behind)
                if early is not None and ahead is not None:
                    mark = self._queue(held, device, ours, early.copies(target.address, source, attempt, nbytes), early)
                else:
                    parts: list[Queued] = [
                        (TO_DEVICE, target.address + start, source + start, size)
                        for start, size in pieces(nbytes, LARGE)
                    ]
                    mark = self._queue(held, device, ours, parts)
                held.entry.marks.append(mark)
                device.last = mark
                if ahead is not None or waiting is not None:
                    device.give_back(ours, mark)
                    device.follow_mark(device.outward, mark)
                for stream in lasting:
                    if stream is not None:
                        device.wait_for(stream, mark)
                return [HostToDevice(device, mark, origin) for origin in origins]
            for stream in lasting:
                if stream is not None:
                    device.follow(device.outward, stream)
            mark = device.mark(device.outward)
            if not until(mark.ready, time.monotonic() + _UNPINNED_SECONDS):
                raise DeviceError(
                    "the tensor is in use by kernels that do not end", who=f"cuda:{target.on}, {target}",
                    expected=f"an end within {_UNPINNED_SECONDS:.0f} s",
                )  # fmt: skip
            for start, size in pieces(nbytes):
                self._driver("cuMemcpyHtoD", target.address + start, source + start, size)
        return []

    def _again(self, early: CodedResult, held: Pinned) -> Any:
        if not early.take():
            raise DeviceError("the device has no memory", who=f"cuda:{early.device.ordinal}", got=str(early.nbytes))
        held.entry.unmarked += 1
        return early.stop()

    def order(self, to_device: HostToDevice, seconds: float | None) -> None:
        """What the caller queues from now on comes after the copies; where no stream is known the host waits for them.

        Raises:
            TimeoutError: that took more than *seconds*.
            DeviceError: the device fails.
        """
        device, mark, origin = to_device.device, to_device.mark, to_device.origin
        with self._lock:
            if mark.ready():
                return
            if origin.now is not None:
                with device.current():
                    device.follow_mark(origin.now(), mark)
                return
        deadline = None if seconds is None else time.monotonic() + seconds
        if origin.lasting is None and not self._reached(mark, deadline):
            raise TimeoutError("the result is committed, and still on its way to the device")

    # ---- streams that wait ---------------------------------------------------------------------------

    def hold(
        self, targets: Iterable[Region], stream: int | None, held: Lease | Pinned | None,
        attach: Callable[[StreamWaits], None],
    ) -> StreamWaits | None:  # fmt: skip
        """Let the caller's streams wait for a result for *targets*, which is built in the block that is *held*.

        *attach* is told before a result can be written, so that write() gets it. None: there is nothing to wait for.

        Raises:
            ConfigError: they cannot.
            DeviceError: the driver fails.
        """
        found = [target for target in targets if target.nbytes]
        check_may_wait(found, isinstance(held, Pinned))
        if not found:
            return None
        with self._lock:
            assert self._driver is not None
            devices = [(self._devices[each.on], each.device) for each in found if each.device is not None]
            if self._words is None:
                with devices[0][0].current():
                    self._words = Words(self._driver)
            stream_waits = hold(self._words, devices, stream)
            attach(stream_waits)
            return stream_waits

    def let_go(self, stream_waits: StreamWaits) -> None:
        """The streams go on. Safe to call again."""
        with self._lock:
            stream_waits.release()
            for ordinal, marks in stream_waits.before.items():
                while marks and ordinal in self._devices:
                    self._devices[ordinal].forget(marks.pop())

    def follow(self, to_device: HostToDevice, stream: int | None) -> None:
        """What is queued on the caller's stream from now on comes after the copies."""
        with self._lock, to_device.device.current():
            to_device.device.follow_mark(stream_of(to_device.origin, stream), to_device.mark)

    def landed(self, to_device: HostToDevice, deadline: float) -> bool:
        """Wait for the copies; whether they were done by *deadline*."""
        return self._reached(to_device.mark, deadline)

    # ---- what both directions need -------------------------------------------------------------------

    def _reached(self, mark: Mark, deadline: float | None) -> bool:
        """Wait for a mark, holding the lock for each look only."""

        def ready() -> bool:
            with self._lock:
                return mark.ready()

        return until(ready, deadline)

    def _after_its_users(self, device: Device, stream: Any, origin: Origin) -> None:
        if origin.order is not None:
            origin.order(int(stream))
        elif origin.stream is not None:
            device.follow(stream, origin.stream)

    def _queue(
        self, held: Pinned, device: Device, stream: Any, copies: Iterable[Queued], early: EagerCopy | None = None
    ) -> Mark:  # fmt: skip
        """Queue copies, with *early* the last of these; the mark behind them."""
        held.entry.unmarked += 1  # and stays so if an error leaves copies without a mark
        for copy in copies:
            if callable(copy):
                copy(stream)
            else:
                device.queue(copy, stream)
        leaves = device.leave_memory(early.memory, stream) if early is not None else 0
        mark = device.mark(stream)
        if early is not None:
            device.left(leaves, mark)
            held.entry.unmarked -= 1  # see begin()
        held.entry.unmarked -= 1
        return mark

    # ---- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for copies under way, for a bounded time, and give all back. Safe to call again."""
        if os.getpid() != self._pid:
            return
        for resident in [one for device in self._devices.values() for one in list(device.residents)]:
            if not resident.fetch():
                break  # each of the others would wait as long
        with self._lock:
            self._closed = True
            deadline = time.monotonic() + _CLOSE_SECONDS
            idle = all(_is_idle(each, deadline) or _is_idle(each, deadline) for each in self._devices.values())
            pool, self._pool = self._pool, None
            if pool is not None and not (idle and pool.close()):
                _abandoned.append((self._arena, self._to_hosts))
                log.warning("a CUDA device still copies, or its driver fails: pinned memory is kept")
            words, self._words = self._words, None
            if words is not None and not words.close(next(iter(self._devices.values())), deadline):
                log.warning("a stream still waits for a result, or the driver fails: a page of pinned memory is kept")
            self._to_hosts = []
            while self._devices:
                self._devices.popitem()[1].close("" if idle else "it still copied when the communicator was closed")

    def disown(self) -> None:
        """In a forked child: the driver, its blocks and its streams are the parent's."""
        self._lock = threading.RLock()
        self._closed = True

    def __del__(self) -> None:
        self.close()


def _is_idle(device: Device, deadline: float) -> bool:
    try:
        with device.current():
            marks = [device.mark(stream) for stream in device.streams]
            return all(until(mark.ready, deadline) for mark in marks)
    except DeviceError:
        return False


_abandoned: list[tuple[Arena, list[DeviceToHost]]] = []  # whose memory a device may still use

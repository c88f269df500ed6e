"""Where one call's bytes lie in the arena, and what a commit does with them."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np

from wancoll.client.codecs import Array, Feed, dropped
from wancoll.client.cuda.eager_copy import EagerCopy, Numbers
from wancoll.client.cuda.pinned import Pinned
from wancoll.client.cuda.staging import DeviceToHost, HostToDevice, Staging
from wancoll.client.cuda.stream_wait import StreamWaits, check_may_wait
from wancoll.client.memory.arena import Arena, Block, Lease
from wancoll.client.memory.tensors import Region
from wancoll.collective import Codec
from wancoll.errors import ArenaFull
from wancoll.limits import WORD, blocks
from wancoll.native import ffi, lib
from wancoll.schedule.numbers import storage

_SOONEST, _LATEST = 0.001, 0.016  # seconds between two looks for blocks of a result that are final

Spans = tuple[tuple[int, int], ...]  # (start, end) addresses, ascending, apart from each other


class Placement:
    """Where an operation reads and where its result is built, as offsets into the arena's file.

    Args:
        arena: of the connection.
        sources: the input's parts, one after the other in the input buffer; none where this member gives nothing.
        targets: the result's parts, one after the other in the result buffer; none where this member gets nothing.
        fresh: nobody uses the target, which lies in the arena, before the commit: the result is built in it.
        unwanted: bytes of a result that the daemon builds here and nobody needs; without targets.
        codec: of the call.
        nearest: what is encoded is rounded to nearest, so that anybody may do it.
        late: the daemon may take part for this member; then it has the result's elements only.
        feed: changes the input on its way into the arena.
        staging: copies from and to devices; only if a source or a target is on one.
        share: which share of the input its schedule needs first, and of how many.
    """

    def __init__(
        self,
        arena: Arena,
        sources: tuple[Region, ...],
        targets: tuple[Region, ...],
        *,
        fresh: bool = False,
        unwanted: int = 0,
        codec: Codec = Codec.none,
        nearest: bool = True,
        late: bool = False,
        feed: Feed | None = None,
        staging: Staging | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._arena, self._fresh, self._unwanted, self.feed = arena, fresh, unwanted, feed
        self._codec, self._nearest, self._late = codec, nearest, late
        self.sources, self.targets = sources, targets
        on_device = any(region.device is not None or region.pinned is not None for region in (*sources, *targets))
        self._staging = staging if on_device else None
        if self._staging is not None:
            self._staging.check((*sources, *targets))
        self.to_devices: list[HostToDevice] = []  # copies of results that a commit has sent on their way
        self._stream_waits: StreamWaits | None = None  # the caller's streams that wait for the result
        self._input_buffer: Lease | Pinned | None = None
        self._result_buffer: Lease | Pinned | None = None
        self._share = share
        self._to_host: DeviceToHost | None = None  # what is on its way from devices
        self._table: Lease | None = None  # filled lies there: each attempt reads it anew, until the operation ends
        self._swapped: Block | None = None  # the target's block, if its pages will be swapped with those of the result
        self.input_buffer = self.result_buffer = 0
        self.filled = -1  # as in Post: what is not there yet, the daemon waits for
        self.shown = -1  # as in Post
        self.input_coded = self.result_coded = False  # as in Post
        self.result_kept = feed is not None and codec.sparse and codec.of_result  # as in Post
        # Of each target, or of all together, where results go to devices before the commit.
        self._early: list[EagerCopy | None] = []
        self._words: Numbers | None = None  # shown lies there
        self._words_held: Lease | None = None
        self.pause = math.inf  # seconds after which it pays to look again, for somebody who waits
        # The block that the input is a part of; what lies outside the arena, or in pieces, is copied first.
        self._inside: Block | None = None
        if len(sources) == 1 and feed is None:
            self._inside = arena.find(sources[0].address, sources[0].nbytes)
        # The caller's memory.
        self.reads = _spans(sources)
        self.writes = _spans(targets)
        stays = self._inside is not None or any(source.device is not None for source in sources)
        self.pins: Spans = self.reads if stays else ()

    def conflicts(self, earlier: Placement) -> bool:
        """Whether this call would use what *earlier* is going to write, or write what *earlier* still reads."""
        if self.feed is not None and earlier.feed is not None and self.feed.conflicts(earlier.feed):
            return True
        return (
            overlap(self.writes, earlier.writes)
            or overlap(self.reads, earlier.writes)
            or overlap(self.writes, earlier.pins)
        )

    def prepare(self, deadline: float | None = None) -> None:
        """Take the blocks, and copy the input to its block unless it can stay; after an error end() has to come.

        Raises:
            ArenaFull: so it is.
            TimeoutError: a device had not handed over by *deadline* what the host changes first, or what is not pinned.
            DeviceError: a device failed.
        """
        with self._staging.within((*self.sources, *self.targets)) if self._staging is not None else nullcontext():
            self._prepare(deadline)

    def _prepare(self, deadline: float | None) -> None:
        arena = self._arena
        self._input_buffer = self._result_buffer = self._words = None
        self._early, self.shown, self.filled = [], -1, -1
        self.input_coded = self.result_coded = False
        if self._staging is not None:
            for target in self.targets:
                self._staging.expect(target)
            for each in {*self.sources, *self.targets}:
                self._staging.settle(each, deadline)
        nbytes = sum(target.nbytes for target in self.targets) or self._unwanted
        if self._fresh and nbytes:
            block = arena.find(self.targets[0].address, nbytes)
            assert block is not None  # the target was made there
            self.result_buffer = block.offset + self.targets[0].address - block.address
        elif nbytes:
            one = self.targets[0] if len(self.targets) == 1 else None
            swaps = one is not None and not self.result_kept
            self._swapped = arena.swappable(one.address, one.nbytes) if one is not None and swaps else None
            if self._swapped is not None:
                self._result_buffer = self._warm(arena.take(nbytes, self._swapped.nbytes))
            else:
                self._result_buffer = self._decode_on_device() or self._block(
                    self.targets, 2 * nbytes if self.result_kept else nbytes
                )
            self.result_buffer = self._result_buffer.block.offset
            if self._staging is not None and isinstance(self._result_buffer, Pinned):
                self._expect_early(self._staging, nbytes)
        if self._inside is not None:
            self.input_buffer = self._inside.offset + self.sources[0].address - self._inside.address
        elif (nbytes := sum(source.nbytes for source in self.sources)) and not self._encode_on_device():
            input_buffer = self._block(self.sources, max(nbytes, self.feed.nbytes if self.feed is not None else 0))
            self._input_buffer = input_buffer
            self.input_buffer = input_buffer.block.offset
            at, late = 0, []
            for source in self.sources:
                if source.device is None or self._staging is None:
                    lib.wc_pages_copy(input_buffer.block.address + at, source.address, source.nbytes, 0)
                elif self.feed is not None or not isinstance(input_buffer, Pinned):
                    self._staging.read(source, input_buffer.block.address + at, input_buffer, deadline)
                elif source.nbytes:
                    late.append((at, source))
                at += source.nbytes
            if late and self._staging is not None and isinstance(input_buffer, Pinned):
                self._to_host = self._staging.fill(late, nbytes, input_buffer, self._share)
                self._table = self._to_host.table
                self.filled = self._table.block.offset
            if self.feed is not None:
                self.feed.add(input_buffer.block.address)
                self.input_coded = self.feed.encodes

    def _encode_on_device(self) -> bool:
        """Have the input's device encode it, if it can."""
        if self._staging is None or not self._nearest or (self.feed is not None and self.feed.decay != 1):
            return False
        sources = [source for source in self.sources if source.nbytes]
        held = self._staging.take_coded(self._codec, sources)
        to_host = self._staging.encode(self._codec, sources, held, self._share, self.feed) if held is not None else None
        if held is None or to_host is None:
            return False
        self._input_buffer, self.input_buffer, self.input_coded = held, held.block.offset, True
        self._to_host, self._table, self.filled = to_host, to_host.table, to_host.table.block.offset
        return True

    def _decode_on_device(self) -> Pinned | None:
        """The block for a result that its device will decode, if it can."""
        if self._staging is None or self._late:
            return None
        targets = [target for target in self.targets if target.nbytes]
        held = self._staging.take_coded(self._codec, targets)
        early = self._staging.expect_coded(self._codec, targets, held) if held is not None else None
        if early is None:
            return None
        self._early, self.result_coded = [early], True
        return held

    def look(self) -> None:
        """See whether what is on its way from devices will come; send what is final to devices.

        Raises:
            DeviceError: it will not.
        """
        staging, to_host, words = self._staging, self._to_host, self._words  # several threads look
        result_buffer = self._result_buffer
        if to_host is not None and staging is not None and staging.filled(to_host):
            self._to_host = None
        if staging is not None and words is not None and isinstance(result_buffer, Pinned):
            now = words.copy()
            begun = [staging.begin(early, now, result_buffer) for early in self._early if early is not None]
            self.pause = _SOONEST if any(begun) else min(2 * self.pause, _LATEST)

    def _expect_early(self, staging: Staging, nbytes: int) -> None:
        """Have the daemon say which blocks of the result are final, if that helps anybody."""
        early = self._early if self.result_coded else staging.early(self.targets)
        if not any(each is not None and not each.over for each in early):
            return
        try:
            self._words_held = held = self._arena.take(WORD * blocks(nbytes))
        except ArenaFull:
            return
        memory = ffi.buffer(ffi.cast("char *", held.block.address), WORD * blocks(nbytes))
        words = np.frombuffer(memory, np.uint32)
        words[:] = 0
        self._early, self._words, self.shown, self.pause = early, words, held.block.offset, _SOONEST

    def _block(self, regions: tuple[Region, ...], nbytes: int) -> Lease | Pinned:
        if self._staging is None or all(region.device is None for region in regions):
            return self._warm(self._arena.take(nbytes))
        return self._staging.take(nbytes)

    def _warm(self, lease: Lease) -> Lease:
        """A block that will be written from end to end."""
        self._arena.fill(lease.block, 0, lease.block.used)
        return lease

    def commit(self, nbytes: int, attempt: int) -> None:
        """Bring the first *nbytes* of *attempt*'s result to its targets: fewer than they hold if members were lost.

        To a device it is only sent on its way. Doing it again, after an interruption, is harmless.

        Raises:
            DeviceError: a device failed: the tensor's contents are undefined.
        """
        result_buffer = self._result_buffer
        if result_buffer is None or not self.targets:
            return
        at = result_buffer.block.address
        if self.result_coded and (whole := self._early[0]) is not None:
            self._copy_out(self.targets, at, whole.nbytes, result_buffer, whole, attempt)
            return
        early = self._early or [None] * len(self.targets)
        if len(self.targets) > 1:
            for target, each in zip(self.targets, early, strict=True):
                self._copy_out((target,), at, target.nbytes, result_buffer, each, attempt)
                at += target.nbytes
            return
        target = self.targets[0]
        # Of a part the rest of the target must stay as it is, so its pages cannot go.
        swapped = self._swapped if nbytes == target.nbytes else None
        if swapped is None or not self._arena.swap(swapped, result_buffer.block, self.result_buffer):
            self._copy_out((target,), at, nbytes, result_buffer, early[0], attempt)

    def dropped(self, start: int, stop: int, times: int) -> tuple[int, Array] | None:
        """*times* what the codec has dropped of the sums of elements [start, stop), which this member made."""
        if not self.result_kept or start == stop or self._result_buffer is None or self.feed is None:
            return None
        at, nbytes = self._result_buffer.block.address, sum(target.nbytes for target in self.targets)
        memory = np.frombuffer(ffi.buffer(ffi.cast("char *", at), 2 * nbytes), storage(self.feed.dtype)).reshape(2, -1)
        return start, dropped(self.feed.dtype, memory[1, start:stop], memory[0, start:stop], times)

    def end(self) -> None:
        """The operation has ended: what went to devices early, and was not committed, is void. Safe to call again."""
        if self._staging is not None and isinstance(self._result_buffer, Pinned):
            for early in self._early:
                if early is not None:
                    self._staging.end(early, self._result_buffer)

    def hold(self, stream: int | None) -> StreamWaits | None:
        """Let the caller's streams wait for the result; None: there is none here.

        Raises:
            ConfigError: they cannot.
            DeviceError: the driver fails.
        """
        if self._staging is None:
            check_may_wait([target for target in self.targets if target.nbytes], pinned=False)
            return None
        return self._staging.hold(self.targets, stream, self._result_buffer, self._attach)

    def _attach(self, stream_waits: StreamWaits) -> None:
        self._stream_waits = stream_waits

    def _copy_out(
        self, targets: tuple[Region, ...], at: int, nbytes: int, result_buffer: Lease | Pinned,
        early: EagerCopy | None, attempt: int,
    ) -> None:  # fmt: skip
        staging = self._staging
        if targets[0].device is None or staging is None:
            lib.wc_pages_copy(targets[0].address, at, nbytes, 0)
        else:
            to_host = self._to_host if self._late else None  # who comes too late has a result before its input is read
            self.to_devices += staging.write(
                targets, at, nbytes, result_buffer, lambda: self._stream_waits, early, attempt,
                to_host.mark if to_host is not None else None,
            )  # fmt: skip


def overlap(a: Spans, b: Spans) -> bool:
    """Whether any address is in both."""
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][0] < b[j][1] and b[j][0] < a[i][1]:
            return True
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return False


def _spans(regions: tuple[Region, ...]) -> Spans:
    if len(regions) == 1:
        return ((regions[0].address, regions[0].address + regions[0].nbytes),)
    return tuple(sorted((each.address, each.address + each.nbytes) for each in regions))

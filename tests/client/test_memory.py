"""The client's side of the arena: ranges, blocks, leases, and pages that really change places."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.tools import refused
from wancoll import resources
from wancoll._native import ffi, lib
from wancoll.client.memory import arena as arena_module
from wancoll.client.memory.arena import IDLE_BYTES, LARGE, PAGE, Arena, ArrayMemory, Block, Lease, Ranges, size_class
from wancoll.client.memory.tensors import new_array
from wancoll.errors import ArenaFull, DeviceError
from wancoll.peer.arena import Arena as DaemonArena

MIB = 1 << 20


def new_file(nbytes: int = 1 << 31) -> int:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena([new_file(), os.eventfd(0)], 1 << 31)
    yield arena
    arena.close()


def view(lease: Lease, nbytes: int | None = None) -> np.ndarray[Any, Any]:
    return np.asarray(ArrayMemory(lease, lease.block.address, nbytes or lease.block.nbytes))


def shown_offset(address: int) -> int:
    """Which part of the arena's file the kernel shows at *address*."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            where, _, offset, *_ = line.split()
            start, end = (int(part, 16) for part in where.split("-"))
            if start <= address < end:
                assert "memfd:arena" in line
                return int(offset, 16) + address - start
    raise AssertionError("not mapped")


def resident_pages(address: int, nbytes: int) -> int:
    """Pages that this process has in its page tables there."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(nbytes // PAGE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())


# ---- ranges -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.sampled_from([1, 4, 16])), max_size=60), st.randoms())
def test_ranges_never_overlap_and_merge(steps: list[tuple[bool, int, int]], choose: random.Random) -> None:
    ranges, taken = Ranges(256), list[tuple[int, int]]()
    for give, size, align in steps:
        if give and taken:
            ranges.give(*taken.pop(choose.randrange(len(taken))))
        elif (start := ranges.take(size, align)) is not None:
            assert start % align == 0
            assert 0 <= start
            assert start + size <= 256
            assert all(start + size <= other or other + length <= start for other, length in taken)
            taken.append((start, size))
        else:
            # Nothing fits: check against every possible place.
            for start in range(0, 257 - size, align):
                assert any(start < other + length and other < start + size for other, length in taken)
        assert ranges.free == 256 - sum(length for _, length in taken)
    for start, size in taken:
        ranges.give(start, size)
    assert ranges.take(256, 1) == 0


@given(st.integers(0, 1 << 40))
def test_size_classes(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % (LARGE if size >= LARGE else PAGE) == 0
    assert size_class(size) == size
    assert size <= max(PAGE, 2 * nbytes)
    if nbytes > 8 * LARGE:
        assert size <= 1.25 * nbytes


# ---- leases -----------------------------------------------------------------------------------------


def test_a_block_goes_back_when_its_lease_dies(arena: Arena) -> None:
    lease = arena.take(5000)
    block = lease.block
    assert (block.nbytes, block.used) == (8192, 5000)
    other = arena.take(5000)
    assert other.block is not block
    del lease
    again = arena.take(8000)
    assert again.block is block
    assert block.used == 8000


def test_the_warmest_block_is_taken_first(arena: Arena) -> None:
    leases = [arena.take(MIB) for _ in range(3)]
    blocks = [lease.block for lease in leases]
    for i in (1, 0, 2):
        leases[i] = arena.take(1)  # the old one dies
    taken = [arena.take(MIB) for _ in range(3)]
    assert [lease.block for lease in taken] == [blocks[2], blocks[0], blocks[1]]


def test_arrays_hold_their_block_views_too(arena: Arena) -> None:
    array: Any = view(arena.take(4096)).view(np.float32).reshape(32, 32)
    block = arena.find(array.ctypes.data, array.nbytes)
    part = array[3:5, ::2]
    part[:] = 7
    del array
    gc.collect()
    other = arena.take(4096)
    assert other.block is not block
    assert (part == 7).all()
    del part
    gc.collect()
    assert arena.take(4096).block is block


def test_find(arena: Arena) -> None:
    leases = [arena.take(n) for n in (4096, 5000, 3 * MIB, 100, 4 * MIB)]
    for lease in leases:
        block = lease.block
        assert arena.find(block.address, block.nbytes) is block
        assert arena.find(block.address + 1, block.nbytes - 1) is block
        assert arena.find(block.address + block.nbytes - 1, 1) is block
        assert arena.find(block.address + 1, block.nbytes) is None
        inside = (ctypes.c_char * block.used).from_address(block.address)
        inside[0], inside[block.used - 1] = b"a", b"z"
        assert os.pread(arena._fd, 1, block.offset) == b"a"
        assert os.pread(arena._fd, 1, block.offset + block.used - 1) == b"z"
    outside = np.zeros(10)
    assert arena.find(outside.ctypes.data, 80) is None
    assert arena.find(0, 0) is None


def test_large_blocks_are_aligned(arena: Arena) -> None:
    arena.take(100)
    for nbytes in (2 * MIB, 5 * MIB):
        block = arena.take(nbytes).block
        assert block.address % LARGE == 0
        assert block.offset % LARGE == 0


def test_gc_in_the_middle_of_taking_does_not_deadlock(arena: Arena) -> None:
    done = threading.Event()

    def churn() -> None:
        for _ in range(300):
            cycle: list[Any] = [arena.take(3 * MIB)]
            cycle.append(cycle)  # only the collector finds it, at any allocation
            del cycle
        done.set()

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread = threading.Thread(target=churn, daemon=True)
        thread.start()
        thread.join(30)
    finally:
        gc.set_threshold(*before)
    assert done.is_set()


def test_threads_never_share_a_block(arena: Arena) -> None:
    problems: list[str] = []

    def work(mark: int) -> None:
        choose = random.Random(mark)
        for _ in range(300):
            size = choose.choice([100, 5000, 70000, 3 * MIB])
            mine = view(arena.take(size), size)
            mine[[0, -1]] = mark
            if (mine[[0, -1]] != mark).any():
                problems.append("another thread wrote here")

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    arena.take(1)
    assert arena.leased_bytes == PAGE


# ---- memory that goes back to the system -----------------------------------------------------------------


def test_idle_memory_is_bounded(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "IDLE_BYTES", 16 * MIB)
    leases = [arena.take(4 * MIB) for _ in range(8)]
    for lease in leases:
        view(lease)[:] = 1
    assert arena.resident_bytes() == 32 * MIB
    del lease
    leases.clear()
    arena.take(1)
    assert arena.idle_bytes == 32 * MIB  # as much as was used at once lately stays warm
    for _ in range(5000):
        arena.take(PAGE)
    lease = arena.take(4 * MIB)
    del lease
    assert arena.idle_bytes <= 16 * MIB
    assert arena.resident_bytes() <= 16 * MIB


def test_the_coldest_goes_first_and_reads_as_zeros_later(arena: Arena) -> None:
    leases = [arena.take(2 * MIB) for _ in range(4)]
    blocks = [lease.block for lease in leases]
    for lease in leases:
        view(lease)[:] = 5
    del lease
    while leases:
        del leases[0]
    arena._settle()
    arena._trim(4 * MIB)
    assert arena.idle_bytes == 4 * MIB
    kept = [arena.take(2 * MIB), arena.take(2 * MIB)]
    assert {lease.block for lease in kept} == set(blocks[2:])
    assert (view(kept[0]) == 5).all()
    fresh = arena.take(2 * MIB)
    assert fresh.block not in blocks
    assert (view(fresh) == 0).all()


def test_a_full_arena_says_so_and_recovers() -> None:
    arena = Arena([new_file(16 * MIB), os.eventfd(0)], 16 * MIB)
    leases = [arena.take(2 * MIB) for _ in range(8)]
    needed = "expected 4 MiB free of the arena's 16 MiB"
    words = ("the arena has no room", "a block for 3 MiB", needed, "got 0 B free", "--arena-bytes")
    with refused(*words, "drop arrays", error=ArenaFull):
        arena.take(3 * MIB)
    with refused("the arena has no room", f"--arena-bytes={64 * MIB} or more", error=ArenaFull) as caught:
        arena.take(32 * MIB)
    assert "drop" not in str(caught.value)
    leases.clear()
    big = arena.take(16 * MIB)  # idle blocks of other sizes make room
    assert big.block.nbytes == 16 * MIB
    arena.close()


def test_sizes_that_change_all_the_time_do_not_fill_the_arena() -> None:
    arena = Arena([new_file(64 * MIB), os.eventfd(0)], 64 * MIB)
    choose = random.Random(1)
    held: list[Lease] = []
    for _ in range(2000):
        held.append(arena.take(choose.randrange(1, 6 * MIB)))
        if len(held) > 3:
            held.pop(choose.randrange(4))
        if choose.random() < 0.3 and len(held) > 1 and held[0].block.nbytes == held[1].block.nbytes:
            arena.swap(held[0].block, held[1].block, held[1].block.offset)
        spans = sorted((b.offset, b.offset + b.nbytes) for b in (lease.block for lease in held))
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    arena.close()


def test_no_address_space() -> None:
    fd = new_file()
    with refused("the arena cannot be mapped", "got Cannot allocate memory", "--arena-bytes"):
        Arena([fd, os.eventfd(0)], 1 << 50)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_after_close_arrays_stay_readable_and_nothing_is_reused() -> None:
    arena = Arena([new_file(), os.eventfd(0)], 1 << 31)
    fd = arena._fd
    kept, idle = view(arena.take(2 * MIB)), arena.take(2 * MIB)
    kept[:] = 9
    view(idle)[:] = 1
    block = idle.block
    del idle
    arena.close()
    arena.close()
    assert (kept == 9).all()
    assert arena.resident_bytes() == 2 * MIB  # the idle one went back
    assert arena.take(2 * MIB).block is not block
    del arena
    gc.collect()
    assert kept.sum() == 9 * 2 * MIB
    del kept
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_forked_child_changes_nothing(arena: Arena) -> None:
    array = view(arena.take(4 * MIB))
    array[:] = 3
    idle = arena.take(4 * MIB)
    view(idle)[:] = 4
    del idle
    arena.take(1)
    child = os.fork()
    if child == 0:
        arena.disown()
        ok = bool((array == 3).all())
        array[::2] = 5
        ok &= bool((array[::2] == 5).all())
        del array
        gc.collect()
        arena.close()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (array == 3).all()
    assert (view(arena.take(4 * MIB)) == 4).all()
    assert arena.resident_bytes() == 8 * MIB


def test_a_forked_child_waits_for_no_thread_of_its_parent(arena: Arena) -> None:
    """One that had the lock is not there."""
    with arena._lock:
        child = os.fork()
        if child == 0:
            arena.disown()
            arena.close()
            os._exit(0)
    end = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.001)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@pytest.mark.parametrize("nbytes", [2 * MIB, 5 * MIB, 7 * MIB - 1, 12 * MIB + 1])
def test_filling_gets_the_memory_and_changes_no_byte(arena: Arena, nbytes: int) -> None:
    lease = arena.take(nbytes)
    block = lease.block
    written = {0: b"a", nbytes // 2: b"b", nbytes - 1: b"c"}
    for at, byte in written.items():
        os.pwrite(arena._fd, byte, block.offset + at)
    array = view(lease, nbytes)
    for _ in range(2):
        arena.fill(block, 0, nbytes)
        assert {at: bytes(array[at : at + 1]) for at in written} == written
        assert np.count_nonzero(array) == 3
        assert nbytes <= arena.resident_bytes() <= min(nbytes + MIB, block.nbytes)


def test_only_the_part_that_is_asked_for_is_filled(arena: Arena) -> None:
    block = (lease := arena.take(24 * MIB)).block
    arena.fill(block, 8 * MIB, 4 * MIB)
    assert arena.resident_bytes() == 4 * MIB
    arena.fill(block, 4096, 5000)  # in small pages
    assert arena.resident_bytes() == 4 * MIB + 2 * PAGE
    del lease


def test_filled_memory_is_in_huge_pages_for_client_and_daemon() -> None:
    """Else who writes there first stops at each of 512 times as many small ones."""
    daemon = DaemonArena(64 * MIB)
    arena = Arena([os.dup(daemon.fd), os.eventfd(0)], daemon.nbytes)
    nbytes = 16 * MIB
    block = (lease := arena.take(nbytes)).block
    shown = in_huge_pages()
    arena.fill(block, 0, nbytes)
    if in_huge_pages() == shown:
        pytest.skip("this system gives no huge pages of shared memory")
    theirs = np.asarray(daemon._map)[block.offset : block.offset + nbytes]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    theirs[:] = 7
    view(lease)[:] = 8
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 64
    assert (theirs == 8).all()
    del theirs
    arena.close()
    daemon.close()


def test_a_new_array_has_its_memory_before_anybody_writes_there(arena: Arena) -> None:
    kept = new_array(arena, (3, MIB), np.dtype(np.float32))
    assert (kept.shape, kept.dtype) == ((3, MIB), np.float32)
    assert arena.resident_bytes() == 12 * MIB
    del kept
    warm = new_array(arena, (3, MIB), np.dtype(np.float32))
    assert arena.resident_bytes() == 12 * MIB
    del warm


def in_huge_pages() -> int:
    """KiB of shared memory that this process shows in huge pages."""
    return int(Path("/proc/self/smaps_rollup").read_text().split("ShmemPmdMapped:")[1].split()[0])


# ---- swapping pages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, MIB, 2 * MIB, 6 * MIB, 64 * MIB])
def test_pages_really_change_places(arena: Arena, nbytes: int) -> None:
    a, b = arena.take(nbytes), arena.take(nbytes)
    at_a, at_b = view(a), view(b)
    at_a[:], at_b[:] = 1, 2
    at_a[-1], at_b[0] = 11, 22
    first, second = a.block.offset, b.block.offset
    addresses = (a.block.address, b.block.address)
    pages = a.block.nbytes // PAGE

    assert arena.swap(a.block, b.block, second)
    assert (a.block.offset, b.block.offset) == (second, first)
    assert (a.block.address, b.block.address) == addresses
    for block in (a.block, b.block):
        assert shown_offset(block.address) == block.offset
        assert shown_offset(block.address + block.nbytes - 1) == block.offset + block.nbytes - 1
        assert resident_pages(block.address, block.nbytes) == pages  # warm: no page has to be found again
    assert (at_a[0], at_a[1], at_a[-1]) == (22, 2, 2)
    assert (at_b[0], at_b[1], at_b[-1]) == (1, 1, 11)
    # The same memory as the file, not a copy.
    at_a[1] = 77
    assert os.pread(arena._fd, 1, second + 1) == b"\x4d"
    os.pwrite(arena._fd, b"\x58", first + 2)
    assert at_b[2] == 0x58

    assert arena.swap(a.block, b.block, first)
    assert (at_a[0], at_a[1], at_a[2], at_a[-1]) == (1, 1, 0x58, 11)
    assert (at_b[0], at_b[1], at_b[-1]) == (22, 77, 2)


def test_swapping_again_is_harmless(arena: Arena) -> None:
    a, b = arena.take(2 * MIB), arena.take(2 * MIB)
    view(a)[:], view(b)[:] = 1, 2
    wanted = b.block.offset
    for _ in range(3):  # as after an interruption
        assert arena.swap(a.block, b.block, wanted)
        assert (view(a)[::4096] == 2).all()
        assert a.block.offset == wanted


def test_neighbours_are_left_alone(arena: Arena) -> None:
    leases = [arena.take(2 * MIB) for _ in range(6)]
    for i, lease in enumerate(leases):
        view(lease)[:] = i
    for i, j in ((1, 4), (4, 2), (1, 2), (3, 1)):
        arena.swap(leases[i].block, leases[j].block, leases[j].block.offset)
    expected = [0, 1, 2, 3, 4, 5]
    for i, j in ((1, 4), (4, 2), (1, 2), (3, 1)):
        expected[i], expected[j] = expected[j], expected[i]
    for value, lease in zip(expected, leases, strict=True):
        assert (view(lease) == value).all()


def test_readers_never_see_a_hole(arena: Arena) -> None:
    a, b = arena.take(2 * MIB), arena.take(2 * MIB)
    view(a)[:], view(b)[:] = 1, 2
    stop, seen = threading.Event(), set[int]()

    def read() -> None:
        at_a = view(a)
        while not stop.is_set():
            seen.update(np.unique(at_a[::4096]).tolist())  # a hole would be a segmentation fault

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(2000):
        arena.swap(a.block, b.block, b.block.offset)
    stop.set()
    thread.join()
    assert seen <= {1, 2}


def test_refused_swaps_change_nothing(arena: Arena) -> None:
    a, b, small = arena.take(2 * MIB), arena.take(2 * MIB), arena.take(MIB)
    view(a)[:], view(b)[:] = 1, 2
    assert not arena.swap(a.block, small.block, small.block.offset)  # sizes differ
    assert not arena.swap(a.block, b.block, 12345 * PAGE)  # not what b shows
    spare = arena._spare
    arena._spare = spare + 1  # not a page: the system refuses, as it would without MREMAP_DONTUNMAP
    assert not arena.swap(a.block, b.block, b.block.offset)
    arena._spare = spare
    assert (view(a) == 1).all()
    assert (view(b) == 2).all()
    assert arena.swap(a.block, b.block, b.block.offset)
    assert (view(a) == 2).all()


def test_a_block_that_shows_anothers_pages_is_never_used_again(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refused when half of the swap was done: the result is where it belongs."""
    a, b = arena.take(2 * MIB), arena.take(2 * MIB)
    block = b.block
    with monkeypatch.context() as half:
        half.setattr("wancoll.client.memory.arena.lib", SimpleNamespace(wc_pages_exchange=lambda *_: 1))
        assert arena.swap(a.block, block, block.offset)
    del b
    assert arena.take(2 * MIB).block is not block
    assert arena.find(block.address, 1) is None
    del a


def test_a_swap_that_the_system_refuses_leaves_no_address_unowned(arena: Arena) -> None:
    """At a limit of address space the system unmaps the target of a move, and then refuses to move."""
    a, b = arena.take(2 * MIB), arena.take(2 * MIB)
    view(a)[:], view(b)[:] = 1, 2
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used - MIB, limits[1]))  # less than there is
    try:
        done = arena.swap(a.block, b.block, b.block.offset)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not done
    assert (view(a) == 1).all()
    assert (view(b) == 2).all()
    assert arena._holed or _reserved(arena._spare)  # it has the spare room, or never swaps again
    assert arena.swap(a.block, b.block, b.block.offset) is not arena._holed


def _reserved(address: int) -> bool:
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in mapped)


def test_a_tensor_whose_memory_the_system_took_away_is_named(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = arena.take(2 * MIB), arena.take(2 * MIB)
    with monkeypatch.context() as taken:
        taken.setattr("wancoll.client.memory.arena.lib", SimpleNamespace(wc_pages_exchange=lambda *_: 2))
        with pytest.raises(DeviceError, match="took a tensor's memory away"):
            arena.swap(a.block, b.block, b.block.offset)
    assert arena.find(a.block.address, 1) is None


# ---- copying ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 77])
@pytest.mark.parametrize(("to_shift", "from_shift"), [(0, 0), (61, 17)])
@pytest.mark.parametrize("threads", [0, 1, 3, 99])
def test_copies(nbytes: int, to_shift: int, from_shift: int, threads: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 128, np.uint8)
    target = np.zeros(nbytes + 128, np.uint8)
    lib.wc_pages_copy(target.ctypes.data + to_shift, source.ctypes.data + from_shift, nbytes, threads)
    assert (target[to_shift : to_shift + nbytes] == source[from_shift : from_shift + nbytes]).all()
    assert not target[:to_shift].any()
    assert not target[to_shift + nbytes :].any()


def test_native_errors() -> None:
    block = Block(PAGE + 1, 0, PAGE)
    assert lib.wc_pages_bind(block.pages, -1) < 0
    assert lib.wc_pages_discard(block.pages, -1) < 0
    assert lib.wc_pages_release(1, PAGE) < 0
    address = ffi.new("uint64_t *")
    assert lib.wc_pages_reserve(1 << 60, address) < 0
    assert lib.wc_pages_reserve(3 * PAGE, address) == 0
    assert address[0] % LARGE == 0
    assert lib.wc_pages_release(address[0], 3 * PAGE) == 0
    assert IDLE_BYTES > 0


# ---- memory that is not there ----------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the system says that it has free, in [0]."""
    said = [1 << 40]
    monkeypatch.setattr(resources, "free_memory", lambda: said[0])
    return said


def test_memory_is_asked_for_before_it_is_used(free: list[int]) -> None:
    """A process that uses more than there is would be killed, without a word."""
    arena = Arena([new_file(1 << 34), os.eventfd(0)], 1 << 34)
    free[0] = 1 << 30
    words = ("a block for 4 GiB", "not enough memory", "expected 4 GiB", "got 1 GiB free", "twice its tensor")
    with refused(*words, error=ArenaFull):
        arena.take(4 << 30)
    kept = arena.take(600 * MIB)
    words = ("expected 1.17 GiB, 600 MiB of it for others that have not been written yet", "got 1 GiB free")
    with refused(*words, error=ArenaFull):  # both would fit alone
        arena.take(600 * MIB)
    del kept
    gc.collect()
    arena.take(700 * MIB)  # what nobody holds makes room
    free[0] = 0
    arena.take(1 * MIB)  # little is not asked for each time
    with refused("got 0 B free", error=ArenaFull):
        [arena.take(1 * MIB) for _ in range(40)]
    arena.close()


@pytest.mark.parametrize(("free_bytes", "times"), [(64 << 30, 1), (1 << 30, 20)])
def test_the_system_is_asked_seldom_while_much_is_free(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, times: int
) -> None:
    """Asking takes milliseconds. What may be taken unasked is half of what has to stay free."""
    asked: list[int] = []

    def free_memory() -> int:
        asked.append(free_bytes)
        return free_bytes

    monkeypatch.setattr(resources, "free_memory", free_memory)
    arena = Arena([new_file(1 << 34), os.eventfd(0)], 1 << 34)
    kept = [arena.take(32 * MIB) for _ in range(20)]
    assert (len(kept), len(asked)) == (20, times)
    del kept
    arena.close()


def test_memory_that_is_asked_for_again_and_again_is_counted_once(free: list[int]) -> None:
    arena = Arena([new_file(1 << 30), os.eventfd(0)], 1 << 30)
    free[0] = 100 * MIB
    for _ in range(20):
        arena.take(20 * MIB)
    arena.take(40 * MIB)
    arena.close()


def test_memory_that_was_written_is_counted_once(free: list[int]) -> None:
    arena = Arena([new_file(1 << 30), os.eventfd(0)], 1 << 30)
    free[0] = 66 * MIB
    kept = arena.take(32 * MIB)
    view(kept)[:] = 1  # the system knows of it now
    free[0] = 34 * MIB
    arena.take(32 * MIB)
    arena.close()


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, None, 3 << 20),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max"}, None, 3 << 20),
        (  # version 2: the tightest of those above counts, and the cache can be taken back
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "1000000",
                "sys/fs/cgroup/a/memory.current": "900000",
                "sys/fs/cgroup/a/memory.stat": "anon 5\nactive_file 30000\ninactive_file 20000\n",
                "sys/fs/cgroup/a/b/memory.max": "2000000",
                "sys/fs/cgroup/a/b/memory.current": "100000",
            },
            1000000,
            150000,
        ),
        (  # version 1
            {
                "proc/self/cgroup": "8:pids:/x\n4:memory:/a\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "500000\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "510000\n",
                "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 20000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "510000\n",
            },
            500000,
            10000,
        ),
    ],
    ids=["no groups", "no limit", "version 2", "version 1"],
)
def test_what_the_system_has_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], total: int | None, free: int
) -> None:
    monkeypatch.setattr(resources, "_ROOT", tmp_path)
    meminfo = "MemTotal: 9000 kB\nMemAvailable: 2048 kB\nSwapFree: 1024 kB\nHugePages_Total: 0\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert resources.total_memory() == (total or machine)
    assert resources.free_memory() == free


def test_a_system_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_ROOT", tmp_path)
    assert resources.free_memory() == resources.total_memory() > 0


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "600000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n0::/\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
    ids=["no groups", "no limit", "version 2", "less than one", "version 1"],
)
def test_cores_that_a_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(resources, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert resources.cores() == cores

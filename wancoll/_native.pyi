"""What native/build.py builds, with types: cffi gives it none. The headers beside native/build.py say what it all does.

A pointer to a struct, and the struct itself, are one class here, as attributes see them. tests/engine/test_native.py
compares names and counts of arguments with the headers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, overload

class Pointer(Protocol):
    """C data that Python only hands on, indexes or counts from."""

    def __int__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __getitem__(self, index: int) -> Any: ...
    def __setitem__(self, index: int, value: Any) -> None: ...
    def __add__(self, other: int) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Struct(Pointer, Protocol):
    """A struct, by pointer or in an array; fields that are not named below are C's alone."""

class Config(Struct, Protocol):
    workers: int
    segment: int
    stripe: int

class Place(Struct, Protocol):
    offset: int
    buffer: int
    encoded: int

class Step(Struct, Protocol):
    link: int
    start: int
    length: int
    to: Place
    left: Place
    right: Place
    after: Sequence[int]
    number: int
    direction: int
    action: int
    result: int
    measured: int

class Op(Struct, Protocol):
    id: int
    epoch: int
    seq: int
    fingerprint: int
    front: Pointer
    back: Pointer
    bytes: Sequence[int]
    dtype: int
    op: int
    codec: int
    stochastic: int
    noise: Sequence[int]
    divisor: int
    lanes: int
    tracks: int
    no_turns: int
    stripe: int
    steps_count: int
    digest: int
    steps: Array[Step]
    filled: Pointer
    shown: Pointer
    attempt: int

class Event(Struct, Protocol):
    type: int
    lane: int
    link: int
    op: int
    value: int
    extra: int
    saved: int
    error_squares: float
    norm_squares: float
    error: int
    text: Pointer

class LaneStats(Struct, Protocol):
    bytes_sent: int
    bytes_received: int
    frames_sent: int
    frames_received: int
    frames_dropped: int
    checksum_failures: int
    parked: int
    attached: int

class Note(Struct, Protocol):
    link: int
    length: int
    bytes: Pointer

class Block(Struct, Protocol):
    address: int
    offset: int
    bytes: int

class CodecBlock(Struct, Protocol):
    elements: int
    bytes: int

_T_co = TypeVar("_T_co", covariant=True)
_Kernel: TypeAlias = Callable[..., None]

class Kernels(Struct, Protocol):
    name: Pointer
    reduce: Sequence[Sequence[_Kernel]]
    average: Sequence[_Kernel]
    encode: Sequence[Sequence[_Kernel]]
    decode: Sequence[Sequence[_Kernel]]
    accumulate: Sequence[Sequence[_Kernel]]
    error: Sequence[Sequence[_Kernel]]

    def hash64(self, data: Any, n: int, /) -> int: ...
    def hash_begin(self, state: Pointer, /) -> None: ...
    def hash_add(self, state: Pointer, data: Any, n: int, /) -> None: ...
    def hash_end(self, state: Pointer, /) -> int: ...

class Array(Pointer, Protocol[_T_co]):
    """An array that Python made."""

    def __getitem__(self, index: int) -> _T_co: ...
    def __len__(self) -> int: ...

class _FFI:
    """Of cffi's, what this project uses."""

    NULL: Any
    errno: int

    @overload
    def new(self, cdecl: Literal["wc_config *"]) -> Config: ...
    @overload
    def new(self, cdecl: Literal["wc_op *"]) -> Op: ...
    @overload
    def new(self, cdecl: Literal["wc_lane_stats *"]) -> LaneStats: ...
    @overload
    def new(self, cdecl: Literal["wc_block *"], init: tuple[int, int, int]) -> Block: ...
    @overload
    def new(self, cdecl: Literal["wc_step[]"], init: int) -> Array[Step]: ...
    @overload
    def new(self, cdecl: Literal["wc_event[]"], init: int) -> Array[Event]: ...
    @overload
    def new(self, cdecl: Literal["wc_note[]"], init: int) -> Array[Note]: ...
    @overload
    def new(self, cdecl: Literal["uint64_t *", "uint8_t[256]", "double[2]"]) -> Array[int]: ...
    @overload
    def new(self, cdecl: Literal["uint64_t[]"], init: int) -> Array[int]: ...
    @overload
    def new(self, cdecl: Literal["wc_noise *"], init: dict[str, int]) -> Struct: ...
    @overload
    def new(self, cdecl: Literal["wc_fill[]"], init: list[tuple[int, int, int, int]]) -> Array[Struct]: ...
    @overload
    def addressof(self, lib: _Lib, name: str) -> Pointer: ...
    @overload
    def addressof(self, array: Array[Struct], index: int) -> Pointer: ...
    def memmove(self, to: Pointer, source: bytes | bytearray, size: int) -> None: ...
    def cast(self, cdecl: str, value: Any) -> Pointer: ...
    def from_buffer(self, value: Any, require_writable: bool = False) -> Pointer: ...
    def buffer(self, cdata: Pointer, size: int) -> memoryview: ...
    def string(self, cdata: Pointer) -> bytes: ...

class _Lib:
    """Of the headers: every function, and the constants that Python compares with."""

    WC_EV_DONE: int
    WC_EV_CANCELLED: int
    WC_EV_LANE_DOWN: int
    WC_EV_MISMATCH: int
    wc_cuda_text: Pointer
    wc_arithmetic_text: Pointer

    def wc_kernels_default(self) -> Kernels: ...
    def wc_kernels_named(self, name: bytes, /) -> Kernels: ...
    def wc_dtype_size(self, dtype: int, /) -> int: ...
    def wc_codec_shape(self, codec: int, /) -> CodecBlock: ...
    def wc_fpenv_enter(self) -> int: ...
    def wc_fpenv_leave(self, saved: int, /) -> None: ...
    def wc_engine_new(self, config: Config, /) -> Pointer: ...
    def wc_engine_free(self, engine: Pointer, /) -> None: ...
    def wc_engine_fd(self, engine: Pointer, /) -> int: ...
    def wc_engine_events(self, engine: Pointer, out: Array[Event], cap: int, /) -> int: ...
    def wc_notes_fd(self, engine: Pointer, /) -> int: ...
    def wc_notes_take(self, engine: Pointer, out: Array[Note], cap: int, /) -> int: ...
    def wc_note_send(self, engine: Pointer, link: int, note: bytes, length: int, /) -> int: ...
    def wc_link_open(self, engine: Pointer, link: int, lanes: int, tracks: int, epoch: int, /) -> int: ...
    def wc_lane_attach(self, engine: Pointer, link: int, lane: int, fd: int, checksums: int, /) -> int: ...
    def wc_link_epoch(self, engine: Pointer, link: int, epoch: int, /) -> int: ...
    def wc_link_pace(self, engine: Pointer, link: int, rate: int, /) -> int: ...
    def wc_link_close(self, engine: Pointer, link: int, /) -> int: ...
    def wc_post(self, engine: Pointer, op: Op, /) -> int: ...
    def wc_op_lacks_input(self, engine: Pointer, op: int, /) -> int: ...
    def wc_bell_add(self, engine: Pointer, fd: int, /) -> int: ...
    def wc_bell_remove(self, engine: Pointer, fd: int, /) -> None: ...
    def wc_fill_told(self, fill: Pointer, /) -> None: ...
    def wc_cancel(self, engine: Pointer, op: int, /) -> int: ...
    def wc_lane_statistics(self, engine: Pointer, link: int, lane: int, out: LaneStats, /) -> int: ...
    def wc_lane_tcp_info(self, engine: Pointer, link: int, lane: int, out: Pointer, size: int, /) -> int: ...
    def wc_digest_stripes(self, address: int, nbytes: int, stripe: int, out: Pointer, /) -> int: ...
    def wc_pages_reserve(self, nbytes: int, address: Pointer, /) -> int: ...
    def wc_pages_release(self, address: int, nbytes: int, /) -> int: ...
    def wc_pages_bind(self, block: Block, fd: int, /) -> int: ...
    def wc_pages_disown(self, block: Block, fd: int, /) -> int: ...
    def wc_pages_discard(self, block: Block, fd: int, /) -> int: ...
    def wc_pages_exchange(self, a: Block, b: Block, wanted: int, spare: int, fd: int, /) -> int: ...
    def wc_pages_copy(self, to: int, source: int, nbytes: int, /) -> None: ...

ffi: _FFI
lib: _Lib

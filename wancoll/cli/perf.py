"""`wancoll perf`: measures collectives over a range of sizes, checks their values, and prints nccl-tests' columns."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from wancoll.cli.options import Seconds, between
from wancoll.collective import DType, ReduceOp
from wancoll.errors import ConfigError, OperationAborted, WancollError
from wancoll.limits import DEFAULT

if TYPE_CHECKING:
    import numpy as np

    from wancoll.client.communicator import Communicator
    from wancoll.collective import Receipt

MAX_PEERS = 32  # the known values' reductions are exact in int8 up to 42
EXIT_WRONG = 1
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
OTHER_OPERATIONS = 5  # for each size: the check, what the ranks tell each other, and the start

DTypeName = Literal["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"]
OpName = Literal["sum", "avg", "min", "max", "prod"]

perf = App(name="perf", help="Measure collectives, with the columns of nccl-tests.")


@dataclass(frozen=True)
class Settings:
    """What every rank runs. Sizes are bytes."""

    sizes: tuple[int, ...]
    iterations: int
    warmup: int
    dtype: str
    op: str
    arena: bool
    timeout: float  # seconds for the group to start, and for each operation


@dataclass(frozen=True)
class Row:
    """One size: times are seconds per operation, the mean over ranks of each rank's median, minimum and maximum."""

    size: int  # bytes
    count: int  # elements
    type: str
    redop: str
    time: float
    time_min: float
    time_max: float
    algbw: float  # GB/s: size / time
    busbw: float  # GB/s: algbw * 2 (N-1)/N
    wrong: int  # elements that differ from what they should be, of all ranks
    bytes_sent: int  # of the busiest rank, for one operation


@perf.command(name="all_reduce")
def all_reduce(
    *,
    peers: Annotated[
        int,
        Parameter(name=("--peers", "-n"), validator=between(1, MAX_PEERS), help="Members of the group."),
    ] = 4,
    min_bytes: Annotated[str, Parameter(name=("--min-bytes", "-b"), help="Smallest tensor, bytes (K, M, G).")] = "4K",
    max_bytes: Annotated[str, Parameter(name=("--max-bytes", "-e"), help="Largest tensor, bytes (K, M, G).")] = "64M",
    factor: Annotated[
        int, Parameter(name=("--factor", "-f"), validator=between(2, 1 << 20), help="From one size to the next.")
    ] = 4,
    iters: Annotated[int, Parameter(validator=between(1, 1_000_000), help="Timed operations for each size.")] = 20,
    warmup: Annotated[int, Parameter(validator=between(0, 1_000_000), help="Operations before the timed ones.")] = 5,
    dtype: Annotated[DTypeName, Parameter(help="Element type.")] = "float32",
    op: Annotated[OpName, Parameter(help="Reduce op.")] = "sum",
    lanes: Annotated[
        int,
        Parameter(
            validator=between(1, DEFAULT.max_lanes), help="TCP connections to each other peer; not with --socket."
        ),
    ] = 8,
    checksum: Annotated[bool, Parameter(help="Send a checksum with every frame; not with --socket.")] = True,
    outside_arena: Annotated[
        bool, Parameter(negative=(), help="Use ordinary arrays, which are copied in and out, not those of comm.empty.")
    ] = False,
    master: Annotated[
        str, Parameter(help="HOST:PORT of a master: join its group as one rank. Every machine runs this command.")
    ] = "",
    socket: Annotated[str, Parameter(help="Path of a running daemon's socket: join through it as one rank.")] = "",
    group: Annotated[str, Parameter(help="Name of the group, with --master or --socket.")] = "perf",
    timeout: Annotated[Seconds, Parameter(help="Seconds for the group to start, and for each operation.")] = 60.0,
    as_json: Annotated[
        bool, Parameter(name="--json", negative=(), help="Print one JSON object instead of the table.")
    ] = False,
) -> int:
    """Measure all_reduce, in place, blocking, operations back to back; check the values of the first one.

    Without --master and --socket it starts a master and --peers daemons on loopback, and a process for each rank.

    The columns are those of nccl-tests: time is the median of the timed operations, algbw is size / time, busbw is
    algbw * 2 (N-1)/N, the traffic of each member, and wrong counts elements with a wrong value on any rank. Exit code 1
    if there is one.
    """
    settings = Settings(
        sizes=sizes_between(parse_size(min_bytes, "--min-bytes"), parse_size(max_bytes, "--max-bytes"), factor),
        iterations=iters,
        warmup=warmup,
        dtype=dtype,
        op=op,
        arena=not outside_arena,
        timeout=timeout,
    )
    _check(settings)
    if master and socket:
        raise ConfigError("--master and --socket exclude each other", expected="one of them", got="both")
    if master:
        import wancoll

        options = _peer_options(checksum)
        rows = _sweep(
            settings, partial(wancoll.connect, group, master=master, lanes=lanes, peer_options=options), peers
        )
    elif socket:
        import wancoll

        rows = _sweep(settings, partial(wancoll.connect, group, socket=socket), peers)
    else:
        rows = _private_cluster(settings, peers, lanes, checksum)
    with closing(rows):
        done = report_json(settings, peers, rows) if as_json else report_table(settings, peers, rows)
    return EXIT_WRONG if any(row.wrong for row in done) else 0


def parse_size(text: str, what: str) -> int:
    """Bytes of a size such as "4096", "4K", "1M" or "2G".

    Raises:
        ConfigError: not of that form, or zero.
    """
    match = re.fullmatch(r"(\d{1,15})([KMG]?)", text, re.ASCII | re.IGNORECASE)
    size = int(match[1]) * UNITS[match[2].upper()] if match else 0
    if not size:
        raise ConfigError(f"{what} is no size", expected="bytes such as 4096, 4K, 1M or 2G", got=repr(text))
    return size


def sizes_between(low: int, high: int, factor: int) -> tuple[int, ...]:
    """*low*, *low* times *factor* and so on, up to *high*.

    Raises:
        ConfigError: *high* is below *low*.
    """
    if high < low:
        raise ConfigError("--max-bytes is below --min-bytes", expected=f"at least {low} bytes", got=f"{high} bytes")
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def busbw(size: int, seconds: float, world_size: int) -> float:
    """Bus bandwidth of an all-reduce in GB/s (10^9 bytes): what each member sends, by the time it takes."""
    return 2 * (world_size - 1) / world_size * size / seconds / 1e9


def _check(settings: Settings) -> None:
    from wancoll.client.tensors import numpy_dtype

    itemsize = DType[settings.dtype].itemsize
    if settings.sizes[0] < itemsize:
        raise ConfigError(
            "--min-bytes holds no element", expected=f"at least {itemsize} bytes", got=f"{settings.sizes[0]}"
        )
    numpy_dtype(settings.dtype)


# ---- where the ranks run ------------------------------------------------------------------------------


def _private_cluster(settings: Settings, peers: int, lanes: int, checksum: bool) -> Generator[Row, None, None]:
    from wancoll.chaos import Cluster

    patience = settings.timeout * (settings.iterations + settings.warmup + OTHER_OPERATIONS)
    with Cluster(peers=peers, lanes=lanes, peer_args=_peer_options(checksum)) as cluster:
        ranks = [cluster.client(i, _rank, settings, peers) for i in range(peers)]
        for _ in settings.sizes:
            rows = [rank.next(patience) for rank in ranks]
            yield rows[0]  # the ranks have agreed on one


def _rank(socket: str, settings: Settings, peers: int) -> Generator[Row, None, None]:
    import wancoll

    yield from _sweep(settings, partial(wancoll.connect, "perf", socket=socket), peers)


def _sweep(settings: Settings, connect: Callable[..., Communicator], peers: int) -> Generator[Row, None, None]:
    try:
        with connect(start_world=peers, min_world=peers, timeout=settings.timeout) as comm:
            for size in settings.sizes:
                yield measure(comm, settings, size)
    except TimeoutError as late:
        raise WancollError(
            "not all ranks came in time",
            expected=f"{peers} members, each within {settings.timeout:g} s",
            got=str(late),
            hint="start the command on every machine with the same options, or raise --timeout",
        ) from late


def _peer_options(checksum: bool) -> tuple[str, ...]:
    return () if checksum else ("--no-checksum",)


# ---- measuring ----------------------------------------------------------------------------------------


def measure(comm: Communicator, settings: Settings, size: int) -> Row:
    """Check and time one size; all members call it together and get the same row.

    Raises:
        OperationAborted: a member was lost meanwhile.
    """
    import numpy as np

    from wancoll.client.tensors import numpy_dtype

    count = size // DType[settings.dtype].itemsize
    dtype = numpy_dtype(settings.dtype)
    tensor = comm.empty(count, dtype) if settings.arena else np.empty(count, dtype)
    world = comm.members
    wrong = check_values(comm, tensor, settings.op, world, settings.timeout)
    tensor[...] = 0
    times, sent = time_all_reduce(comm, tensor, settings, world)
    mine = np.array([statistics.median(times), min(times), max(times)])
    same_world(comm.all_reduce(mine, op="avg", timeout=settings.timeout), world)
    totals = np.array([wrong], np.int64)
    same_world(comm.all_reduce(totals, timeout=settings.timeout), world)
    most = np.array([sent], np.int64)
    same_world(comm.all_reduce(most, op="max", timeout=settings.timeout), world)
    middle, low, high = (float(value) for value in mine)
    nbytes = count * dtype.itemsize
    return Row(
        size=nbytes,
        count=count,
        type=settings.dtype,
        redop=settings.op,
        time=middle,
        time_min=low,
        time_max=high,
        algbw=nbytes / middle / 1e9,
        busbw=busbw(nbytes, middle, len(world)),
        wrong=int(totals[0]),
        bytes_sent=int(most[0]),
    )


def time_all_reduce(
    comm: Communicator, tensor: np.ndarray[Any, Any], settings: Settings, world: tuple[str, ...]
) -> tuple[list[float], int]:
    """Seconds of each timed operation, in place and back to back, and the bytes that the last one sent."""
    times = []
    sent = 0
    for i in range(settings.warmup + settings.iterations):
        begin = time.perf_counter()
        receipt = comm.all_reduce(tensor, op=settings.op, timeout=settings.timeout)
        end = time.perf_counter()
        same_world(receipt, world)
        sent = receipt.bytes_sent
        if i >= settings.warmup:
            times.append(end - begin)
    return times, sent


def check_values(
    comm: Communicator, tensor: np.ndarray[Any, Any], op: str, world: tuple[str, ...], timeout: float
) -> int:
    """Reduce known values in place; how many elements of this member's result are wrong."""
    import numpy as np

    contributions = [known_values(op, rank, len(world)) for rank in range(len(world))]
    tensor[...] = np.resize(contributions[comm.rank].astype(tensor.dtype), tensor.shape)
    same_world(comm.all_reduce(tensor, op=op, timeout=timeout), world)
    expected = np.resize(reduced(op, contributions).astype(tensor.dtype), tensor.shape)
    return int(np.count_nonzero(tensor != expected))


def known_values(op: str, rank: int, world_size: int) -> np.ndarray[Any, Any]:
    """One period of what *rank* contributes: small whole numbers, whose reduction every dtype holds exactly."""
    import numpy as np

    values: np.ndarray[Any, Any]
    place = np.arange(3 * world_size)
    mine = place % world_size == rank
    match ReduceOp[op]:
        case ReduceOp.prod:
            values = np.where(mine, 2 + place % 3, 1)
        case ReduceOp.avg:
            values = place % 3 + world_size * mine
        case _:
            values = (place + rank) % 3
    return values


def reduced(op: str, contributions: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The reduction of all ranks' known values."""
    import numpy as np

    result: np.ndarray[Any, Any]
    match ReduceOp[op]:
        case ReduceOp.prod:
            result = np.prod(contributions, axis=0)
        case ReduceOp.min:
            result = np.min(contributions, axis=0)
        case ReduceOp.max:
            result = np.max(contributions, axis=0)
        case ReduceOp.avg:
            result = np.sum(contributions, axis=0) // len(contributions)
        case ReduceOp.sum:
            result = np.sum(contributions, axis=0)
    return result


def same_world(receipt: Receipt, world: tuple[str, ...]) -> None:
    """Refuse to go on measuring with other members."""
    if tuple(receipt.contributors) != tuple(world):
        raise OperationAborted(
            "the group changed while it was measured",
            who=receipt.op_id,
            expected=", ".join(world),
            got=", ".join(receipt.contributors),
            hint="run it again",
        )


# ---- reports ------------------------------------------------------------------------------------------


def report_table(settings: Settings, peers: int, rows: Iterable[Row]) -> list[Row]:
    """Print each row when it is there, then the footer."""
    memory = "arrays in the arena" if settings.arena else "arrays outside the arena"
    print(f"# wancoll perf all_reduce: {peers} ranks, in place, {memory}")
    print(f"# time: median of {settings.iterations} operations after {settings.warmup} to warm up")
    print(f"#{'size':>13} {'count':>13} {'type':>9} {'redop':>6} {'time':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>8}")
    print(f"#{'(B)':>13} {'(elements)':>13} {'':>9} {'':>6} {'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8}", flush=True)
    done = []
    for row in rows:
        done.append(row)
        print(
            f"{row.size:>14} {row.count:>13} {row.type:>9} {row.redop:>6} {row.time * 1e6:>10.1f} "
            f"{row.algbw:>8.3f} {row.busbw:>8.3f} {row.wrong:>8}",
            flush=True,
        )
    wrong = sum(row.wrong for row in done)
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    print(f"# Avg bus bandwidth    : {statistics.fmean(row.busbw for row in done):g}")
    return done


def report_json(settings: Settings, peers: int, rows: Iterable[Row]) -> list[Row]:
    """Print one object: the settings and a list of rows. Times are seconds, sizes bytes, bandwidths GB/s."""
    done = list(rows)
    print(json.dumps({"peers": peers, "settings": asdict(settings), "rows": [asdict(row) for row in done]}, indent=2))
    return done

"""`wancoll perf`: its options, and where the ranks run: in a private cluster, or one of them in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from wancoll.cli.perf.report import report_json, report_table
from wancoll.cli.perf.run import Row, Settings, Variant, sizes_of, sweep
from wancoll.cli.perf.values import COLLECTIVES
from wancoll.collective import Codec, DType
from wancoll.errors import ConfigError, WancollError
from wancoll.limits import DEFAULT, counted
from wancoll.options import AsJson, Seconds, Switch, between
from wancoll.schedule.build import takes
from wancoll.schedule.cost import AVAILABLE
from wancoll.units import parse_size

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator

MAX_PEERS = 32  # the known values' reductions are exact in int8 and bfloat16 up to 42
MAX_IN_FLIGHT = 64
EXIT_WRONG = 1

CollectiveName = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
    "send_recv",
]  # fmt: skip
DTypeName = Literal["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"]
OpName = Literal["sum", "avg", "min", "max", "prod"]


def perf(
    collective: CollectiveName,
    /,
    *,
    peers: Annotated[int, Parameter(name=("--peers", "-n"), validator=between(1, MAX_PEERS))] = 4,
    min_bytes: Annotated[str, Parameter(name=("--min-bytes", "-b"))] = "4K",
    max_bytes: Annotated[str, Parameter(name=("--max-bytes", "-e"))] = "64M",
    factor: Annotated[int, Parameter(name=("--factor", "-f"), validator=between(2, 1 << 20))] = 4,
    iters: Annotated[int, Parameter(validator=between(1, 1000000))] = 20,
    warmup: Annotated[int, Parameter(validator=between(0, 1000000))] = 5,
    dtype: DTypeName = "float32",
    op: OpName = "sum",
    root: Annotated[int, Parameter(name=("--root", "-r"), validator=between(0, MAX_PEERS - 1))] = 0,
    algorithm: str = "auto",
    codec: str = "none",
    in_flight: Annotated[int, Parameter(name="--async", validator=between(1, MAX_IN_FLIGHT))] = 1,
    lanes: Annotated[int, Parameter(validator=between(1, DEFAULT.max_lanes))] = 8,
    checksum: bool = True,
    outside_arena: Switch = False,
    site: str = "",
    master: str = "",
    socket: str = "",
    group: str = "perf",
    timeout: Seconds = 60.0,
    as_json: AsJson = False,
) -> int:
    """Measure a collective, operations back to back, with the columns of nccl-tests; check the values of the first one.

    Without --master and --socket, WANCOLL_MASTER and WANCOLL_SOCKET it measures this machine alone, and says so: it
    starts a master and --peers daemons on loopback, and a process for each rank.

    The columns are those of nccl-tests: size is that of the larger tensor, count the elements of the tensor, or of the
    block that one rank gives another; time is the median of the timed operations, algbw is size / time; busbw is algbw
    times 2(n-1)/n for all_reduce, (n-1)/n for reduce_scatter, all_gather, gather, scatter and all_to_all, 1 for the
    others; wrong counts elements with a wrong value on any rank. Exit code 1 if there is one. Then, or in a comment
    below, comes the algorithm that ran, and with --codec the relative L2 error of the values checked, which must be
    within the codec's, and the bytes that it saved one rank in one operation.

    send_recv: each rank sends to the next one and receives from the one before. all_reduce and broadcast are in place,
    the others are not.

    Args:
        collective: What to measure.
        peers: Members of the group.
        min_bytes: Smallest tensor, bytes (K, M, G).
        max_bytes: Largest tensor, bytes (K, M, G).
        factor: From one size to the next.
        iters: Timed operations for each size.
        warmup: Operations before the timed ones.
        dtype: Element type.
        op: Reduce op, where there is one.
        root: Rank, where there is a root.
        algorithm: A name, several with commas, or "all". They take turns. "auto" is the group's choice. hierarchical
            needs --site.
        codec: Wire format of all_reduce: none, bf16, fp16, int8, int4 or fp8, several with commas, or "all". They take
            turns.
        in_flight: Operations in flight at the same time, each on tensors of its own. 1: each one begins when the one
            before is finished.
        lanes: TCP connections to each other peer; not with --socket.
        checksum: Checksums over all data; not with --socket.
        outside_arena: Use ordinary arrays, which are copied in and out, not those of comm.empty.
        site: Label of this machine's site, with --master; for a private cluster a label for each peer, with commas,
            again from the first where they are too few.
        master: HOST:PORT of a master, with standbys HOST:PORT,HOST:PORT: join its group as one rank. Every machine runs
            this command, beyond loopback with a token in WANCOLL_JOIN.
        socket: Path of a running daemon's socket: join through it as one rank.
        group: Name of the group, with --master or --socket.
        timeout: Seconds for the group to start, and for each operation.
    """
    settings = Settings(
        collective=collective,
        sizes=sizes_between(parse_size(min_bytes, "--min-bytes"), parse_size(max_bytes, "--max-bytes"), factor),
        iterations=iters,
        warmup=warmup,
        dtype=dtype,
        op=op,
        root=root,
        variants=variants(collective, algorithm, codec, DType[dtype]),
        in_flight=in_flight,
        arena=not outside_arena,
        timeout=timeout,
    )
    _check(settings, peers)
    if master and socket:
        raise ConfigError(
            "--master and --socket exclude each other", expected="one of them", got="both",
            hint="one may come from WANCOLL_MASTER or WANCOLL_SOCKET: --master= or --socket= is without it",
        )  # fmt: skip
    if master or socket:
        import wancoll

        through = f"of the master {master}" if master else f"through the daemon at {socket}"
        alone = "--master=" if master else "--socket="
        where = (
            f"one of {counted(peers, 'rank')} of group {group} {through}: run the same on all machines, and it begins "
            f"({alone} for this machine alone)"
        )
        own = {"master": master, "lanes": lanes, "peer_options": _peer_options(checksum, site)}
        way: dict[str, Any] = own if master else {"socket": socket}
        groups = _ranked(settings, partial(wancoll.connect, group, **way), peers)
    else:
        where = "on this machine alone, over loopback; on several: --master HOST:PORT on each"
        groups = _private_cluster(settings, peers, lanes, checksum, site.split(","))
    with closing(groups):
        done = (report_json if as_json else report_table)(settings, peers, where, groups)
    return EXIT_WRONG if any(row.wrong for row in done) else 0


def sizes_between(low: int, high: int, factor: int) -> tuple[int, ...]:
    """*low*, *low* times *factor* and so on, up to *high*. Raises ConfigError: *high* is below *low*."""
    if high < low:
        raise ConfigError("--max-bytes is below --min-bytes", expected=f"at least {low} bytes", got=f"{high} bytes")
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def variants(collective: str, algorithms: str, codecs: str, dtype: DType) -> tuple[Variant, ...]:
    """Every algorithm asked for, with every codec asked for.

    Raises:
        ConfigError: the collective has no such algorithm, or the codec does not take it or *dtype*.
    """
    coded = [each.name for each in Codec if takes(each, dtype)] if collective == "all_reduce" else []
    return tuple(
        Variant(algorithm, codec)
        for codec in _names("--codec", codecs, ("none", *coded), f"{collective} of {dtype.name}")
        for algorithm in _names("--algorithm", algorithms, ("auto", *AVAILABLE.get(collective, ())), collective)
    )


def _names(option: str, text: str, offered: tuple[str, ...], whose: str) -> tuple[str, ...]:
    """The names in a list with commas, each once; "all" stands for all of them."""
    names = [name for word in text.split(",") for name in (offered if word == "all" else (word,))]
    for name in names:
        if name not in offered:
            raise ConfigError(
                f"{option} is not to be had for {whose}", expected=", ".join((*offered, "all")), got=repr(name)
            )
    return tuple(dict.fromkeys(names))


def _check(settings: Settings, peers: int) -> None:
    from wancoll.client.memory.tensors import numpy_dtype

    collective = COLLECTIVES[settings.collective]
    numpy_dtype(settings.dtype)
    least = DType[settings.dtype].itemsize * collective.blocks(peers)
    if collective.given and settings.sizes[0] < least:
        raise ConfigError(
            "--min-bytes holds no element", expected=f"at least {least} bytes", got=f"{settings.sizes[0]}"
        )
    if collective.rooted and settings.root >= peers:
        raise ConfigError("--root is no rank", expected=f"0 to {peers - 1}", got=str(settings.root))
    if settings.collective == "send_recv" and peers < 2:
        raise ConfigError("nobody sends to itself", who="send_recv", expected="--peers of at least 2", got=str(peers))
    if settings.collective == "barrier" and settings.in_flight > 1:
        raise ConfigError("a barrier is waited for", who="barrier", expected="--async 1", got=str(settings.in_flight))
    if settings.op == "prod" and any(each.codec != "none" for each in settings.variants):
        raise ConfigError("errors of a product have no bound", who="--codec", expected="another --op", got="prod")


# ---- where the ranks run ------------------------------------------------------------------------------


def _private_cluster(
    settings: Settings, peers: int, lanes: int, checksum: bool, sites: list[str]
) -> Generator[list[Row], None, None]:
    from wancoll.chaos import Cluster

    labels = {i: {"WANCOLL_SITE": sites[i % len(sites)]} for i in range(peers)}
    with Cluster(peers=peers, lanes=lanes, peer_args=_peer_options(checksum), peer_env=labels) as cluster:
        ranks = [cluster.client(i, _rank, settings, peers) for i in range(peers)]
        for _ in sizes_of(COLLECTIVES[settings.collective], settings.sizes):
            rows: list[list[Row]] = [rank.next(settings.timeout * settings.operations) for rank in ranks]
            yield rows[0]  # the ranks have agreed on one


def _rank(socket: str, settings: Settings, peers: int) -> Generator[list[Row], None, None]:
    import wancoll

    yield from _ranked(settings, partial(wancoll.connect, "perf", socket=socket), peers)


def _ranked(settings: Settings, connect: Callable[..., Communicator], peers: int) -> Generator[list[Row], None, None]:
    try:
        with connect(start_world=peers, min_world=peers, timeout=settings.timeout) as comm:
            yield from sweep(comm, settings)
    except TimeoutError as late:
        raise WancollError(
            "not all ranks came in time",
            expected=f"{peers} members, each within {settings.timeout:g} s",
            got=str(late),
            hint="start the command on every machine with the same options, or raise --timeout",
        ) from late


def _peer_options(checksum: bool, site: str = "") -> tuple[str, ...]:
    return (*(() if checksum else ("--no-checksum",)), *((f"--site={site}",) if site else ()))

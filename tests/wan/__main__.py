"""`python -m tests.wan up -- COMMAND`: a wide area network on one machine, while COMMAND (or a shell) runs in it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from typing import Annotated, Any

from cyclopts import App, Parameter

from tests.wan import namespace
from tests.wan.network import Host, Wan, why_not
from tests.wan.speed import report
from tests.wan.units import BITS, BYTES, RATIO, SECONDS, parse
from wancoll.process import die_with_parent

app = App(name="python -m tests.wan", help=__doc__)
Word = Annotated[str, Parameter(allow_leading_hyphen=True)]


def _quantity(units: dict[str, float]) -> Any:
    def convert(_: Any, tokens: Any) -> float:
        return parse(tokens[0].value, units)

    return convert


Seconds = Annotated[float, Parameter(converter=_quantity(SECONDS))]
Rate = Annotated[float, Parameter(converter=_quantity(BITS))]
Ratio = Annotated[float, Parameter(converter=_quantity(RATIO))]
Bytes = Annotated[float, Parameter(converter=_quantity(BYTES))]


@app.command
def up(
    *command: Word,
    peers: int = 2,
    delay: Seconds = 0.0,
    jitter: Seconds = 0.0,
    rate: Rate = 0.0,
    queue: Bytes | None = None,
    loss: Ratio = 0.0,
    burst: float = 1.0,
    paths: Annotated[tuple[str, ...], Parameter(name="--path", negative=())] = (),
    ports: Annotated[tuple[str, ...], Parameter(name="--port", negative=())] = (),
    master: str = "own",
    at: str = "0",
    congestion_control: str = "",
    segmentation_offload: bool = True,
    seed: int = 0,
) -> int:
    """Raise a network and run COMMAND (a shell if left out) on one of its hosts; remove it when COMMAND ends.

    COMMAND finds in its environment WAN_PEERS, and for each host WAN_ADDRESS_0, ..., WAN_ADDRESS_MASTER (its address)
    and WAN_HOST_0, ... (its namespace, for nsenter --net=). `python -m tests.wan at 1 COMMAND` runs on another host.

    Args:
        peers: hosts 0, 1, ...
        delay: one way, such as 40ms.
        jitter: the delay wanders by so much in both directions.
        rate: of each peer's uplink and downlink, such as 500Mbit.
        queue: that waits for each rate at most, such as 2MB; by default what it carries in one round trip.
        loss: ratio of packets, such as 0.1%.
        burst: mean number of packets lost in a row.
        paths: what is different on one path, such as 0,1,delay=100ms,loss=1% (from, to, settings).
        ports: what is different at one host, such as 2,up=100Mbit,down=1Gbit.
        master: "own": a host of its own; or the peer that it lives with.
        at: the host that COMMAND runs on.
        congestion_control: of TCP, such as cubic or bbr; by default this machine's.
        segmentation_offload: let TCP send super-packets (which are delayed, lost and counted as 1500-byte packets).
        seed: of loss and jitter.
    """
    if reason := why_not():
        print(f"wan: {reason}", file=sys.stderr)
        return 2
    with Wan(
        peers,
        delay=delay,
        jitter=jitter,
        rate=rate,
        queue=None if queue is None else int(queue),
        loss=loss,
        burst=burst,
        paths=dict(override(text, 2, _PATH_UNITS) for text in paths),
        ports={key[0]: changes for key, changes in (override(text, 1, PORT_UNITS) for text in ports)},
        master="own" if master == "own" else int(master),
        congestion_control=congestion_control,
        segmentation_offload=segmentation_offload,
        seed=seed,
    ) as wan:
        parent = os.getpid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for COMMAND

        def tied() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            die_with_parent(parent)

        words = list(command) or [os.environ.get("SHELL", "/bin/sh")]
        with wan.popen(_host(at), words, env={**os.environ, **_environment(wan)}, preexec_fn=tied) as process:
            return _exit_code(process)


@app.command
def at(host: str, *command: Word) -> None:
    """Run COMMAND on another host of the network that this process is in.

    Args:
        host: 0, 1, ... or "master".
        command: with its arguments.
    """
    name = f"WAN_HOST_{host.upper()}"
    if name not in os.environ:
        sys.exit(f"wan: no ${name}: is this within `python -m tests.wan up`, and is there a host {host}?")
    target = os.open(os.environ[name], os.O_RDONLY | os.O_CLOEXEC)
    namespace.enter(target)
    words = list(command) or [os.environ.get("SHELL", "/bin/sh")]
    try:
        os.execvp(words[0], words)
    except OSError as bad:
        sys.exit(f"wan: cannot run {shlex.join(words)}: {bad}")


@app.command
def speed() -> int:
    """Measure what the delay line sustains on this machine: throughput, and how precise its delays are."""
    if reason := why_not():
        print(f"wan: {reason}", file=sys.stderr)
        return 2
    report()
    return 0


PORT_UNITS = {"up": BITS, "down": BITS, "up_queue": BYTES, "down_queue": BYTES}
_PATH_UNITS = {"delay": SECONDS, "jitter": SECONDS, "loss": RATIO, "burst": {"": 1.0}, "rate": BITS, "queue": BYTES}


def _host(text: str) -> Host:
    return "master" if text == "master" else int(text)


def override(text: str, hosts: int, units: dict[str, dict[str, float]]) -> tuple[Any, dict[str, float]]:
    """The hosts that *text* begins with, and what it sets."""
    words = text.split(",")
    settings = [word.partition("=") for word in words[hosts:]]
    for name, _, _ in settings:
        if name not in units:
            raise ValueError(f"expected one of {', '.join(units)}, got {name!r} in {text!r}")
    return tuple(map(_host, words[:hosts])), {name: parse(value, units[name]) for name, _, value in settings}


def _environment(wan: Wan) -> dict[str, str]:
    variables = {"WAN_PEERS": str(wan.peers)}
    for host in (*range(wan.peers), "master"):
        variables[f"WAN_ADDRESS_{str(host).upper()}"] = wan.address(host)
        variables[f"WAN_HOST_{str(host).upper()}"] = wan.namespace(host)
    return variables


def _exit_code(process: subprocess.Popen[Any]) -> int:
    code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))

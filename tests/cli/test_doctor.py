"""`wancoll doctor`: what it says of facts, and the facts themselves over real sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from wancoll.chaos import Cluster
from wancoll.cli.looking import advice
from wancoll.cli.looking.advice import FAIL, OK, WARN, Finding, Plans, Way
from wancoll.cli.looking.doctor import machine
from wancoll.cli.main import app
from wancoll.errors import ConfigError
from wancoll.limits import GIB, KIB, MIB
from wancoll.local import join_address
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

PLANS = Plans(members=8, lanes=8, rate=125e6, rtt=0.1)  # 7 links of 2 channels of 9 connections: 126; and 128
UNDER_WAY = 1_562_500  # bytes of a lane


@pytest.mark.parametrize(
    ("level", "found"),
    [
        (OK, advice.files(254, PLANS)),
        (FAIL, advice.files(253, PLANS)),
        (FAIL, advice.files(4096, replace(PLANS, members=1024))),
        (WARN, advice.locked_memory(64 * KIB, devices=True)),
        (OK, advice.locked_memory(GIB, devices=True)),
        (OK, advice.shared_memory(2 * GIB)),
        (WARN, advice.shared_memory(256 * MIB)),
        (FAIL, advice.shared_memory(256 * MIB - 1)),
        (OK, advice.congestion(["reno", "bbr"], "cubic")),
        (WARN, advice.congestion(["reno", "cubic"], "cubic")),
        (OK, advice.buffers(2 * UNDER_WAY, 2 * UNDER_WAY, PLANS)),
        (WARN, advice.buffers(2 * UNDER_WAY - 1, 2 * UNDER_WAY, PLANS)),
        (OK, advice.buffers(2 * UNDER_WAY - 1, 2 * UNDER_WAY, replace(PLANS, lanes=9))),
        (OK, advice.ports(1, 1024, PLANS)),
        (WARN, advice.ports(1, 1023, PLANS)),
        (OK, advice.kernel((4, 10), "4.10")),
        (FAIL, advice.kernel((4, 9), "4.9")),
        (OK, advice.synchronised(True)),
        (WARN, advice.synchronised(None)),
        (OK, advice.clock_offset(0.9, 0.0)),
        (WARN, advice.clock_offset(600.0, 0.1)),
        (WARN, advice.clock_offset(-600.1, 0.1)),
        (OK, advice.version("a", "1", "1")),
        (FAIL, advice.version("a", "1", "2")),
        (WARN, advice.way(Way("d", "h:1", "refused"))),
        (OK, advice.way(Way("d", "h:1", "", 0.01, 1500, 1448))),
        (WARN, advice.way(Way("d", "h:1", "", 0.01, 576, 524))),
        (FAIL, advice.way(Way("d", "h:1", "", 0.01, 9000, 8948, swallowed="there"))),
        (FAIL, advice.pair("a", "b", "unreachable", "refused")),
        (WARN, advice.pair("a", "b", "lost", "reset")),
        (OK, advice.measured("a", "b", 0.1, 0.02)),
        (WARN, advice.measured("a", "b", 0.1, 0.021)),
    ],
)
def test_how_bad_it_is(level: str, found: Finding) -> None:
    assert found.level == level
    assert found.found
    assert bool(found.advice) == (level != OK)


def test_words() -> None:
    assert "253; 8 members with 8 lanes want 254" in advice.files(253, PLANS).found
    assert "LimitNOFILE=254" in advice.files(253, PLANS).advice
    assert "tcp_rmem='4096 131072 3125000'" in advice.buffers(1, 1, PLANS).advice
    assert advice.clock_offset(-2.5, 0.25).found == "the master's is 2.500 s behind, +- 0.250 s"
    assert advice.way(Way("d", "h:1", "", 0.0123, 1500, 1448)).found == "d at h:1: 12.3 ms, MTU 1500, MSS 1448"


def test_the_size_that_passes_is_named() -> None:
    found = advice.way(Way("d", "h:1", "", 0.0123, 9000, 8948, swallowed="back", passes=1420))
    assert found.found == (
        "d at h:1: 12.3 ms, MTU 9000, MSS 8948; no full packet comes back, packets of 1420 bytes pass"
    )
    assert "MTU to 1420 at both ends" in found.advice
    assert "tcp_mtu_probing=1" in found.advice


def test_one_address_that_works_is_enough() -> None:
    closed, works = Way("d", "h:1", "refused"), Way("d", "h:2", "", 0.01, 1500, 1448)
    assert [(one.level, one.found, one.advice) for one in advice.ways([closed, works])] == [
        (OK, "d at h:1: refused; h:2 works instead", ""),
        (OK, "d at h:2: 10.0 ms, MTU 1500, MSS 1448", ""),
    ]
    assert [one.level for one in advice.ways([closed, closed])] == [WARN, WARN]


def doctor(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "wancoll", "doctor", *options], capture_output=True, text=True, timeout=120, check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("WANCOLL_")} | {"COLUMNS": "80"},
    )  # fmt: skip
    assert not done.stderr
    return done.returncode, done.stdout


def found(*options: str) -> tuple[int, list[Finding]]:
    """The same, within this process."""
    with pytest.MonkeyPatch.context() as environment, redirect_stdout(StringIO()) as text:
        for name in [name for name in os.environ if name.startswith("WANCOLL_")]:
            environment.delenv(name)
        code = app(["doctor", "--json", *options], result_action="return_value", exit_on_error=False)
    return code, [Finding(**one) for one in json.loads(text.getvalue())]


@contextmanager
def played_master(answer: m.Status | m.Bye, ahead: float = 0.0) -> Iterator[str]:
    """Answers every connection with *answer*, by a clock that is *ahead* of ours by so many seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    at = {"clock": time.time() + ahead} if isinstance(answer, m.Status) else {}
                    connection.sendall(encode(msgspec.structs.replace(answer, **at)))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield join_address(*listener.getsockname()[:2])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def echo(listener: socket.socket) -> None:
    with suppress(OSError), listener.accept()[0] as connection:
        while data := connection.recv(65536):
            connection.sendall(data)


def test_a_clock_that_is_off_another_version_and_a_closed_port() -> None:
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets it
    with closed, socket.create_server(("127.0.0.1", 0)) as lanes:
        threading.Thread(target=echo, args=(lanes,), daemon=True).start()
        there, not_there = (join_address(*one.getsockname()[:2]) for one in (lanes, closed))
        ours = version("wancoll")
        hosts = [m.DaemonStatus("peer-a", [there], ours), m.DaemonStatus("peer-b", [not_there], "0.0.7")]
        status = m.Status(1, 1.0, ours, ["peer-a", "peer-b"], [], [], hosts=hosts)
        with played_master(status, -3600.0) as master:
            code, lines = found("--master", master)
    by_topic = {topic: [one for one in lines if one.topic == topic] for topic in ("clock offset", "version", "lanes")}
    assert code == 1
    (offset,) = by_topic["clock offset"]
    assert (offset.level, offset.found[:17]) == (WARN, "the master's is 3")
    assert " s behind, +- " in offset.found
    assert [(one.level, one.found) for one in by_topic["version"]] == [
        (OK, f"the master has {ours}, as here"),
        (FAIL, f"peer-b has 0.0.7, here is {ours}"),
    ]
    a, b = by_topic["lanes"]
    assert (a.level, b.level) == (OK, WARN)
    assert a.found.startswith(f"peer-a at {there}: ")
    assert int(a.found.split("MTU ")[1].split(",")[0]) > int(a.found.split("MSS ")[1]) > 0
    assert b.found == f"peer-b at {not_there}: Connection refused"


def test_of_a_master_that_answers_nobody_asks_whether_it_runs() -> None:
    with played_master(m.Bye("this master speaks TLS only; give --join a token")) as master:
        code, lines = found("--master", master)
    (line,) = [one for one in lines if one.topic == "master"]
    assert (code, line.level) == (1, FAIL)
    assert line.found.startswith(f"master {master}: did not answer; ")
    assert line.found.endswith("Bye this master speaks TLS only; give --join a token")
    assert line.advice == "what it says: it answers, so address and port are right"


def test_what_an_error_advises_is_the_advice(tmp_path: Path) -> None:
    _, lines = found("--master", "127.0.0.1:1", "--state", str(tmp_path))
    (line,) = [one for one in lines if one.topic == "master"]
    assert "is no state folder of a master" in line.found
    assert line.advice.startswith("give what the master was given")
    assert line.advice not in line.found


@pytest.mark.check
def test_a_master_and_its_daemons_as_they_are() -> None:
    with Cluster(2, fork=True, lanes=1) as cluster:
        code, text = doctor("--master", cluster.master_option)
        assert code == 0, text
        assert max(map(len, text.splitlines())) <= 80
        for i in range(2):
            assert f"lanes         peer-{i} at {join_address(*cluster.peer_address(i))}: " in text
        assert f"ok    version       the master has {version('wancoll')}, as here" in text
        gone = cluster.master_option
    code, text = doctor("--master", gone)
    assert code == 1
    assert f"fail  master        {gone}: " in text
    assert "is `wancoll master` running there" in " ".join(text.split())


def test_this_machine_alone() -> None:
    code, lines = found("--lanes", "256", "--members", "1024", "--rate", "100Gbit/s", "--rtt", "1s")
    by_topic = {one.topic: one for one in lines}
    assert code in (0, 1)
    assert {"kernel", "open files", "shared memory", "OpenSSL", "clock", "TCP buffers"} <= by_topic.keys()
    assert by_topic["kernel"].found == os.uname().release
    assert "1024 members with 256 lanes want 525950" in by_topic["open files"].found
    assert by_topic["TCP buffers"].level == WARN


def test_a_machine_without_openssl(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigError("libssl.so.3 is not found")

    monkeypatch.setattr("wancoll.native.seal.check_possible", missing)
    by_topic = {one.topic: one for one in machine(PLANS)}
    assert by_topic["OpenSSL"].level == FAIL
    assert "libssl.so.3 is not found" in by_topic["OpenSSL"].found
    assert "install libssl3" in by_topic["OpenSSL"].advice


SWALLOWING = """
ip link set lo mtu 9000 gso_max_segs 1 up
nft add table ip t
nft add chain ip t in '{ type filter hook input priority 0; }'
nft add rule ip t in meta length '>' 1450 drop
exec "$@"
"""


@pytest.mark.check
@pytest.mark.wan
def test_a_path_that_swallows_large_packets() -> None:
    """In a network namespace whose loopback drops them without a word. A master and a daemon are there."""
    alone = ["unshare", "--net", "sh", "-ec", SWALLOWING, "sh", sys.executable]
    if subprocess.run([*alone, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("needs network namespaces and nft (root, or the capabilities for them)")
    done = subprocess.run([*alone, __file__], capture_output=True, text=True, timeout=100, check=False)
    (line,) = [Finding(**one) for one in json.loads(done.stdout) if one["topic"] == "lanes"]
    assert line.level == FAIL
    assert "MTU 9000" in line.found
    assert line.found.endswith("no full packet comes there, packets of 1450 bytes pass")


if __name__ == "__main__":
    with Cluster(1) as cluster:
        app(["doctor", "--json", "--master", cluster.master_option], result_action="return_value")

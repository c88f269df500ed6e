"""The `wancoll` command as a user meets it: real processes, real signals, real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

from tests.later import later
from wancoll.cli.asking import Asking
from wancoll.cli.changing import token
from wancoll.cli.looking import status as status_command
from wancoll.cli.main import COMMANDS, app, expected_failures, one_line
from wancoll.cli.main import run as cli_run
from wancoll.cli.running import logs, service
from wancoll.cli.running.peer import peer
from wancoll.cli.variables import alike, variable
from wancoll.errors import ConfigError, Evicted, WancollError
from wancoll.local import split_address
from wancoll.options import address
from wancoll.peer.config import PeerConfig
from wancoll.wire.framing import encode
from wancoll.wire.messages import Bye, EventRecord, GroupStatus, MemberStatus, Status

WANCOLL = [sys.executable, "-m", "wancoll"]
ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
DEADLINE = 30.0  # seconds for anything that a test waits for
SO_TIMESTAMPNS = 35  # of Linux; Python does not name it

# A service that has started and never stops by itself: what a user meets who signals twice.
STUBBORN = """
import trio
from wancoll.cli.running import logs
from wancoll.cli.running import service

async def serve(*, stop, task_status):
    task_status.started("for ever")
    await trio.sleep_forever()

logs.configure("info", "json")
service.run("test", serve, str)
"""


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WANCOLL, *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=os.environ | (env or {}),
        check=False,
    )


def test_a_full_disk_under_their_standard_error_ends_no_process(tmp_path: Path) -> None:
    """Nor is it the reason for an exit code: a log line that cannot be written is lost."""
    code = """
import numpy, sys, wancoll
c = wancoll.connect(socket=sys.argv[1], group="g", name="a", start_world=1)
print(c.all_reduce(numpy.ones(4, numpy.float32)).contributors)
"""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(open("/dev/full", "wb"))

        def start(*args: str) -> subprocess.Popen[str]:
            options = {"stdout": subprocess.PIPE, "stderr": full, "text": True}
            process = stack.enter_context(subprocess.Popen([*WANCOLL, *args], **options))  # type: ignore[call-overload]
            stack.callback(process.kill)
            return process

        master = start("master", "--first", "--listen", "127.0.0.1:0", "--journal", "none")
        address = master.stdout.readline().split()[-1]
        peer = start("peer", "--master", address, "--listen", "127.0.0.1:0", "--socket", str(tmp_path / "s"))
        while "ready" not in peer.stdout.readline():
            pass
        client = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "s")],
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=DEADLINE,
            check=False,
        )
        assert (client.returncode, client.stdout) == (0, b"('a',)\n")
        refused = start("status", "--master", "127.0.0.1:1")
        assert refused.wait(DEADLINE) == 1
        assert start("status", "--no-such-option").wait(DEADLINE) == 2
        for process in (peer, master):
            assert process.poll() is None
            process.terminate()
            assert process.wait(DEADLINE) == 0


# Commands of which each ends by itself, forked from a process that has loaded what they need.
EACH = """
import json, os, sys, tempfile
from wancoll.cli.running import master
from wancoll.cli.running import peer
from wancoll.cli.looking import status
from wancoll.cli.main import run

def one(args):
    said = [tempfile.TemporaryFile() for _ in range(2)]
    if not (pid := os.fork()):
        for number, file in enumerate(said, 1):
            os.dup2(file.fileno(), number)
        try:
            run(args)
        except SystemExit as end:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(end.code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = []
    for file in said:
        with file:
            file.seek(0)
            texts.append(file.read().decode())
    return [code, *texts]

json.dump([one(args) for args in json.load(sys.stdin)], sys.stdout)
"""


def run_each(calls: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit status, standard output and standard error of each `wancoll ARGS`."""
    done = subprocess.run(
        [sys.executable, "-c", EACH],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE,
        check=True,
    )
    return [tuple(each) for each in json.loads(done.stdout)]


@contextlib.contextmanager
def started(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A running command; it is killed at the end if it still runs, and its pipes are closed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (env or {})
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(DEADLINE), "it says nothing"
    line = process.stdout.readline()
    assert line, f"it ended: {process.communicate()[1]}"
    return line.rstrip("\n")


@contextlib.contextmanager
def running_master(*args: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A master on a free port, and its address."""
    with started(*WANCOLL, "master", "--first", "--listen", "127.0.0.1:0", *args, env=env) as process:
        found = re.fullmatch(r"wancoll master ready (127\.0\.0\.1:\d+)", said(process))
        assert found
        yield process, found[1]


def end(process: subprocess.Popen[str], number: signal.Signals) -> int:
    process.send_signal(number)
    return process.wait(DEADLINE)


class Manager:
    """A service manager's notification socket, as systemd makes it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(DEADLINE)

    def wait_for(self, state: str) -> list[str]:
        """The datagram that has the line *state*."""
        while True:
            lines = self.socket.recv(4096).decode().split("\n")
            if state in lines:
                return lines


@pytest.fixture(params=["path", *later("abstract")])
def manager(request, tmp_path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@wancoll-test-{os.getpid()}"
    made = Manager(address)
    yield made
    made.socket.close()


def test_a_master_keeps_its_journal_in_the_users_state_folder(tmp_path):
    """By its port; without one, or where none is wanted, in memory. A second master there ends with the reason."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"XDG_STATE_HOME": str(tmp_path)}
    with running_master(env=env), running_master("--journal", "none", env=env):
        assert list(tmp_path.iterdir()) == []
    with started(*WANCOLL, "master", "--listen", f"127.0.0.1:{port}", env=env) as process:
        said(process)
        assert (tmp_path / "wancoll" / f"master-{port}.sqlite").exists()
        with started(*WANCOLL, "master", "--listen", f"127.0.0.2:{port}", env=env) as other:
            _, told = other.communicate(timeout=DEADLINE)
        assert other.returncode == 2
        assert "the journal is used by another master" in told
        end(process, signal.SIGTERM)


# ---- help and options ---------------------------------------------------------------------------------


def test_help_names_every_command_and_imports_none_of_them():
    code = (
        "import sys\nfrom wancoll.cli.main import run\n"
        "try:\n    run(['--help'])\n"
        "finally:\n    print([m for m in ('trio', 'structlog', 'wancoll_master') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=True)
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", done.stdout)
    assert done.stdout.endswith("[]\n")


def test_version_is_the_packages():
    done = run("--version")
    assert done.returncode == 0
    assert re.match(r"\d+\.\d+\.\d+", done.stdout)


@pytest.mark.parametrize("command", ["master", "peer", "status", "top", "events"])
def test_help_shows_variable_default_and_unit_of_every_option(command):
    done = run(command, "--help", env={"COLUMNS": "600"})
    assert done.returncode == 0
    rows = re.findall(r"│ (--[a-z-]+)(.*?)(?=│ --|╰)", done.stdout, re.DOTALL)
    options = [(name, text) for name, text in rows if name not in ("--help", "--version")]
    assert len(options) >= 3
    for name, text in options:
        variable = "WANCOLL_" + name.removeprefix("--").replace("-", "_").upper()
        assert f"[env var: {variable}]" in text, name
        assert "[default:" in text, name
        if "FLOAT" in text:
            assert "Seconds" in text, name
        if "INT" in text:
            assert re.search("Bytes|connections|threads|events|Members", text), name


def option_names(command: App) -> set[str]:
    found = command.assemble_argument_collection(parse_docstring=False)
    return {name for argument in found if argument.parse for name in argument.names}


def test_the_documents_name_only_options_and_variables_that_exist():
    alone = ["master", "peer", "status", "top", "events", "evict", "leave", "doctor", "trace"]
    alone += ["perf", "chaos", "demo"]
    commands = [*(app[name] for name in alone), app["key"]["rotate"]]
    commands += [app["token"][name] for name in ("create", "list", "revoke")]
    options = set().union(*map(option_names, commands))
    variables = set(map(variable, options))
    variables |= {"WANCOLL_FAILPOINTS", "WANCOLL_MOVE_BUCKETS"}  # of master and peer, of torch's backend; no options
    variables |= {"WANCOLL_ETCD_PASSWORD"}  # of the master: an option would be seen by others on its machine
    # --help: of all commands; --plot: of tests.bench.lanes; --now, --no-block: of systemctl; --strict: of mypy;
    # --delay, --rate, --port: of tests.wan; --prefix: of etcdctl; --wan, --mpi, --ranks: of tests.bench; --nodes: of
    # sbatch; --no-deps, --output-dir: of what makes wheels; --build to --wait: of docker and buildah; the rest: of the
    # examples
    others = {"--help", "--now", "--no-block", "--strict", "--delay", "--rate", "--port", "--wan", "--mpi", "--ranks"}
    others |= {"--prefix", "--backend", "--batch", "--device-ms", "--heads", "--nodes", "--no-deps", "--output-dir"}
    others |= {"--nproc-per-node", "--max-restarts"}  # of torchrun
    others |= {"--build", "--build-arg", "--detach", "--file", "--tag", "--wait", "--layers", "--plot"}
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    assert "--advertise" in text
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - options - others == set()
    assert set(re.findall(r"WANCOLL_[A-Z_]+", text)) - variables == set()


def bad_option(code: int, out: str, err: str, says: str) -> None:
    assert code == 2
    assert out == ""
    assert err.startswith("wancoll: ")
    assert err.count("\n") == 1, err
    assert says in err


def test_an_example_says_what_to_install_where_torch_is_missing(tmp_path):
    """As it is run; who imports one hears Python's own words."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    command = [sys.executable, "-m", "wancoll.examples.ddp", "--help"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "wancoll: ConfigError: wancoll.examples: a package that examples need is not installed; expected torch (the "
        "model); got no torch; run, in the source folder: pip install '.[torch]'\n"
    )


def test_without_its_extension_each_command_says_how_to_build_it(tmp_path):
    """One that imports it at once, one inside trio; doctor, which goes on; and a program."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['wancoll._native'] = None\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    for command in (["perf"], ["peer", "--socket", str(tmp_path / "peer.sock")]):
        done = run(*command, env=env)
        errors = done.stderr.splitlines()
        assert (done.returncode, len(errors)) == (2, 1), done.stderr
        assert errors[0].startswith("wancoll: NotBuilt: the C engine is not built; got ")
        assert errors[0].endswith("; run, in the source folder: pip install .")
    done = run("doctor", "--json", env=env)
    found = {one["topic"]: one for one in json.loads(done.stdout)}
    assert (done.returncode, found["engine"]["level"], done.stderr) == (1, "fail", "")
    assert found["engine"]["advice"] == "run, in the source folder: pip install ."
    assert {"wancoll", "kernel", "clock"} <= found.keys()
    program = "import wancoll\ntry: wancoll.connect('g')\nexcept wancoll.ConfigError as bad: print(bad)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout.startswith("the C engine is not built; ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evict", "m1"], 'wancoll: Command "evict" needs --group, which is missing. (--help lists the options)\n'),
        (["evict", "m1", "--group"], 'wancoll: Command "evict" parameter --group requires an argument. (--help'),
        (["perf"], 'wancoll: Command "perf" needs COLLECTIVE, which is missing. (--help'),
    ],
)
def test_an_option_that_is_missing_is_not_one_without_a_value(capsys, arguments, says):
    with pytest.raises(SystemExit):
        cli_run(arguments)
    assert capsys.readouterr().err.startswith(says)


@pytest.mark.check
@pytest.mark.timeout(200)  # seconds of a machine that does much else
def test_every_bad_option_is_one_line_and_exit_code_2():
    bad = [
        (["master", "--listen", "::1:7400"], "[::1]:7400"),
        (["master", "--listen", "127.0.0.1:70000"], "65535"),
        (["master", "--heartbeat-timeout", "0"], "above 0"),
        (["master", "--heartbeat-timeout", "nan"], "above 0"),
        (["master", "--heartbeat-timeout", "soon"], "soon"),
        (["master", "--frobnicate", "1"], "--frobnicate"),
        (["master", "--listen", "127.0.0.1:0", "--etcd", "127.0.0.1:2379"], "--etcd"),
        (
            ["master", "--listen", "127.0.0.1:0", "--etcd", "http://127.0.0.1:2379", "--etcd-prefix", ""],
            "--etcd-prefix",
        ),
        (["master", "--advertise", "::1"], "--advertise"),
        (["peer", "--master", "127.0.0.1:1,host:port"], "--master"),
        (["peer", "--lanes", "0"], "from 1 to 256"),
        (["peer", "--lanes", "257"], "from 1 to 256"),
        (["peer", "--name", "two words"], "--name"),
        (["peer", "--advertise", "::1"], "--advertise"),
        (["peer", "--master", "host:port"], "--master"),
        (["peer", "--congestion-control", "no_such"], "no_such"),
        (["peer", "--uplink-limit", "20"], "--uplink-limit"),
        (["peer", "--uplink", "no_such0"], "no_such0"),
        (["peer", "--log-level", "loud"], "loud"),
        (["status", "--timeout", "-1"], "above 0"),
        (["status", "--events", "51"], "from 0 to 50"),
        (["frobnicate"], "frobnicate"),
    ]
    for (_, says), said in zip(bad, run_each([args for args, _ in bad]), strict=True):
        bad_option(*said, says)


def test_a_bad_variable_is_named():
    done = run("peer", env={"WANCOLL_LANES": "many"})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "WANCOLL_LANES" in done.stderr
    assert "many" in done.stderr


def test_a_misspelt_variable_is_told_of_at_the_start(tmp_path):
    env = {"WANCOLL_LINKTIMEOUT": "3", "WANCOLL_LINK_TIMEOUT": "4", "WANCOLL_LANE": "2", "WANCOLL_WHATEVER": "1"}
    done = run("peer", "--congestion-control", "no_such", "--socket", str(tmp_path / "s"), env=env)
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert {one["variable"]: one["did_you_mean"] for one in told if one["level"] == "warning"} == {
        "WANCOLL_LINKTIMEOUT": "WANCOLL_LINK_TIMEOUT", "WANCOLL_LANE": "WANCOLL_LANES",
    }  # fmt: skip


def test_no_variable_that_something_reads_is_called_misspelt():
    """They may be set in one place for all commands."""
    read = [set(map(variable, option_names(app[command]))) for command in ("master", "peer")]
    every = {"WANCOLL_CPU", "WANCOLL_FAILPOINTS", "WANCOLL_ETCD_PASSWORD", "WANCOLL_MOVE_BUCKETS"}
    for command in COMMANDS:
        parts = [app[command], *(app[command][each] for each in app[command] if not each.startswith("-"))]
        every.update(*(map(variable, option_names(part)) for part in parts if part.default_command is not None))
    for here in read:
        assert alike(every, here) == {}
        joined = {f"WANCOLL_{one.removeprefix('WANCOLL_').replace('_', '')}": one for one in here if one.count("_") > 1}
        assert alike(joined, here) == joined


def test_a_variable_sets_an_option_and_the_option_wins():
    done = run("status", env={"WANCOLL_MASTER": "127.0.0.1:1"})
    assert "127.0.0.1:1:" in done.stderr
    done = run("status", "--master", "127.0.0.2:1", env={"WANCOLL_MASTER": "127.0.0.1:1"})
    assert "127.0.0.2:1:" in done.stderr


# ---- master and status --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, *later(signal.SIGINT)])
def test_master_gets_ready_answers_and_ends_with_0(number):
    with running_master() as (process, address):
        done = run("status", "--master", address, "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["groups"] == []
        assert answer["daemons"] == []
        assert answer["uptime"] >= 0
        assert end(process, number) == 0
        assert "Traceback" not in process.communicate()[1]


def test_top_draws_in_place_and_gives_the_terminal_back():
    ours, its = pty.openpty()
    try:
        with running_master() as (_, address):
            top = subprocess.Popen(
                [*WANCOLL, "top", "--master", address, "--watch", "0.1"],
                stdin=its, stdout=its, stderr=its, env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            )  # fmt: skip
            os.close(its)
            drawn, over = b"", False
            with contextlib.suppress(OSError):  # it has ended: EIO
                while data := os.read(ours, 4096):
                    drawn += data
                    if not over and drawn.count(b"all is well: no group, 0 daemons") == 2:
                        over = True  # a second SIGINT would meet the interpreter's own end
                        top.send_signal(signal.SIGINT)
            assert top.wait(DEADLINE) == 130
        assert drawn.index(b"\x1b[?1049h") < drawn.index(b"all is well") < drawn.index(b"\x1b[?1049l")
        assert b"Traceback" not in drawn
    finally:
        os.close(ours)


def test_nothing_in_a_console_log_steers_the_terminal():
    """Names of groups and members, addresses and reasons are what others chose."""
    code = """
import structlog
from wancoll.cli.running import logs

logs.configure("info", "console")
log = structlog.get_logger()
bad = "g\\x1b[2J\\u202e"
log.info(bad, group=bad, reason="two words " + bad, members=[bad], ok="plain")
try:
    raise ValueError(bad)
except ValueError:
    log.exception("failed")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=True, encoding="utf-8"
    )
    assert [c for line in done.stderr.splitlines() for c in line if not c.isprintable()] == []
    first, _, last = done.stderr.partition("\n")
    assert r"group=g\x1b[2J\u202e" in first
    assert " ok=plain " in first
    assert last.endswith("ValueError: g\\x1b[2J\\u202e\n"), "a traceback keeps its lines"
    assert 'File "<string>", line 10, in <module>' in last.splitlines()[2]


def test_master_logs_json_lines_to_stderr_where_it_is_no_terminal():
    with running_master(env={"WANCOLL_LOG_LEVEL": "info"}) as (process, _):
        assert end(process, signal.SIGTERM) == 0
        lines = process.communicate()[1].splitlines()
        assert lines
        assert all({"event", "level", "timestamp"} <= json.loads(line).keys() for line in lines)


def test_master_on_an_address_in_use_says_so():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = run("master", "--listen", address)
        assert done.returncode == 2
        errors = [line for line in done.stderr.splitlines() if line.startswith("wancoll: ")]
        assert len(errors) == 1
        assert "in use" in errors[0]
        assert "Traceback" not in done.stderr


def test_status_of_nobody_is_exit_code_1():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound but not listening: refused
        address = f"127.0.0.1:{free.getsockname()[1]}"
        done = run("status", "--master", address)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "MasterUnreachable" in done.stderr
    assert address in done.stderr


@contextlib.contextmanager
def someone_who_says(data: bytes, *, then_close: bool) -> Iterator[str]:
    """A listener that is no master: sends *data* to the first who connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(data)
                if not then_close:
                    over.wait(DEADLINE)
                connection.recv(4096)  # so that closing is an end of stream, not a reset

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join(DEADLINE)


@pytest.mark.parametrize(
    ("data", "then_close", "says"),
    [
        (b"", True, "closed the connection"),
        (b"", False, "no answer within"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "oversized frame"),
        (b"\0\0\0\x03abc", True, "cannot be read"),
        (encode(Bye("go away")), True, "Bye go away"),
    ],
)
def test_status_of_something_else_is_exit_code_1(data, then_close, says):
    with someone_who_says(data, then_close=then_close) as address:
        began = time.monotonic()
        done = run("status", "--master", address, "--timeout", "15" if then_close else "1")
        assert time.monotonic() - began < DEADLINE / 2
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert re.search(says, done.stderr) or "timed out" in done.stderr


def test_who_is_refused_for_good_does_not_ask_again():
    """`events --follow`, `top` and `status --watch` go on after any other failure."""
    refusal = encode(Bye("token X is revoked", True))
    with someone_who_says(refusal, then_close=True) as at, pytest.raises(ConfigError, match="token X is revoked"):
        status_command.find([at], Asking(timeout=DEADLINE))


STATUS = Status(
    term=3,
    uptime=93784.2,
    version="0.1.0",
    daemons=["a", "b"],
    groups=[
        GroupStatus(
            name="default",
            phase="running",
            epoch=7,
            start_world=2,
            min_world=1,
            lanes=8,
            committed_upto=41,
            members=[
                MemberStatus("late", 3, "b", "joining", -1, ["10.0.0.3:1"], 0, 0.25),
                MemberStatus("two", 2, "b", "member", 1, ["10.0.0.2:1"], 42, 0.5),
                MemberStatus("one\x1b[31m", 1, "a", "member", 0, ["10.0.0.1:1", "[::1]:2"], 41, 1.0),
            ],
            waiting_for="one to finish 42",
        )
    ],
    events=[EventRecord(0.0, "default", 7, "epoch", "two\nlines [bold]")],
)


def test_status_tables_show_everything_and_pass_no_control_characters_on(capsys):
    status_command.print_tables(STATUS)
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]
    assert [row[1] for row in cells] == ["one?[31m", "", "two", "late"]  # in rank order, joiners last
    assert [row[0] for row in cells] == ["0", "", "1", "joining"]
    assert [row[-1] for row in cells[:2]] == ["10.0.0.1:1", "[::1]:2"], "each address on a line of its own"
    assert "1970-01-01 00:00:00  default, epoch 7: epoch: two?lines [bold]" in out
    assert "waiting for: one to finish 42" in out
    assert "up 1 d 2 h" in out
    assert "\x1b" not in out


# ---- peer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "join", "dialled"),
    [("", "", "127.0.0.1:7400"), ("", "h:9", "h:9"), ("127.0.0.1:7400", "h:9", "127.0.0.1:7400"), ("a", "", "a:7400")],
)
def test_a_master_that_is_given_counts_before_the_one_that_the_token_names(monkeypatch, master, join, dialled):
    token, found = join and f"WC2{'0' * 64}::abab.{'s' * 43}@{join}", []
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(service, "run", lambda _, serve, *more: found.append(serve.args[0].master))
    peer(config=PeerConfig(master=master, join=token, insecure=not token))
    assert found == [dialled]
    assert address(Asking(join=token).where(master), what="--master", default_port=7400) == dialled


def test_tokens_are_listed_only_by_who_may_and_a_daemons_state_is_named(tmp_path, capsys):
    with pytest.raises(ConfigError, match=f"--state {tmp_path}: is no state .*is it WANCOLL_STATE of a daemon"):
        token.show(master="127.0.0.1:9", asking=Asking(state=str(tmp_path)))
    assert not capsys.readouterr().out


def test_peer_starts_without_a_master_and_ends_with_0(tmp_path):
    path = tmp_path / "peer.sock"
    command = [*WANCOLL, "peer", "--master", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--name", "p"]
    with started(*command, env={"WANCOLL_SOCKET": str(path)}) as process:
        line = said(process)
        pattern = r"wancoll peer started socket=(\S+) data=(\S+) name=p and waits for its master at 127\.0\.0\.1:1"
        found = re.fullmatch(pattern, line)
        assert found, line
        assert found[1] == str(path)
        with socket.create_connection(split_address(found[2]), timeout=DEADLINE):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert end(process, signal.SIGTERM) == 0
        rest, errors = process.communicate()
        assert rest == ""  # it was never ready
        assert "Traceback" not in errors
    assert not path.exists()


def test_peer_is_ready_once_a_master_has_answered(tmp_path, manager):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*WANCOLL, "peer", "--master", f"127.0.0.1:{port}", "--socket", str(tmp_path / "s"), "--name", "p"]
        with started(*command, env={"NOTIFY_SOCKET": manager.address}) as process:
            words = said(process).removeprefix("wancoll peer started ").partition(" and waits ")[0]
            assert manager.wait_for(f"STATUS=waits for its master at 127.0.0.1:{port}") == [
                f"STATUS=waits for its master at 127.0.0.1:{port}"
            ]
            stranger, _ = taken.accept()  # one who answers nothing is no master
            with stranger:
                assert stranger.recv(1)  # its Hello
                assert select.select([manager.socket, process.stdout], [], [], 0)[0] == []
            taken.close()
            with started(*WANCOLL, "master", "--listen", f"127.0.0.1:{port}", "--journal", "none") as master:
                assert said(master) == f"wancoll master ready 127.0.0.1:{port}"
                assert said(process) == f"wancoll peer ready {words}"
                assert manager.wait_for("READY=1") == ["READY=1", f"STATUS=ready {words}"]
            assert end(process, signal.SIGTERM) == 0


def test_peer_may_be_ready_without_a_master(tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    command = [*WANCOLL, "peer", "--master", "127.0.0.1:1", "--socket", str(tmp_path / "s"), "--name", "p"]
    env = {"NOTIFY_SOCKET": manager.address, "WANCOLL_READY_WITHOUT_MASTER": "true"}
    with manager.socket, started(*command, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("wancoll peer started ")
        assert process.stdout.readline().startswith("wancoll peer ready ")
        manager.wait_for("READY=1")
        assert end(process, signal.SIGTERM) == 0


def test_peer_with_watch_stdin_ends_with_its_parent(tmp_path):
    process = subprocess.Popen(
        [*WANCOLL, "peer", "--watch-stdin", "--master", "127.0.0.1:1", "--socket", str(tmp_path / "s")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        said(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# ---- signals and the service manager ------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(tmp_path, number, code):
    manager = Manager(str(tmp_path / "notify"))
    with manager.socket, started(sys.executable, "-c", STUBBORN, env={"NOTIFY_SOCKET": manager.address}) as process:
        assert said(process) == "wancoll test ready for ever"
        process.send_signal(number)
        manager.wait_for("STOPPING=1")
        assert process.poll() is None  # it drains, for ever
        assert end(process, number) == code


def test_the_service_manager_hears_of_readiness_and_stopping(manager):
    with running_master(env={"NOTIFY_SOCKET": manager.address}) as (process, address):
        assert f"STATUS=ready {address}" in manager.wait_for("READY=1")
        assert end(process, signal.SIGTERM) == 0
        manager.wait_for("STOPPING=1")


def test_the_watchdog_is_fed_also_while_draining(tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    manager.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)  # when it was sent, however late it is read
    env = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "100000"}
    with manager.socket, started(sys.executable, "-c", STUBBORN, env=env) as process:
        manager.wait_for("READY=1")
        sent = []
        while len(sent) < 4:
            data, [(_, _, when)], _, _ = manager.socket.recvmsg(4096, 64)
            if b"WATCHDOG=1" in data:
                seconds, nanoseconds = struct.unpack("ll", when)
                sent.append(seconds + nanoseconds / 1e9)
        assert sent[3] - sent[0] >= 0.145  # at half the interval
        process.send_signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        manager.wait_for("WATCHDOG=1")


def test_a_watchdog_meant_for_another_process_is_not_fed(tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    env = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}
    with manager.socket, started(sys.executable, "-c", STUBBORN, env=env) as process:
        manager.wait_for("READY=1")
        process.send_signal(signal.SIGTERM)
        manager.socket.settimeout(DEADLINE)
        assert "STOPPING=1" in manager.socket.recv(4096).decode()


@pytest.mark.parametrize("address", ["/nowhere/at/all", *later("vsock:2:1234")])
def test_a_service_manager_that_cannot_be_told_is_no_reason_to_fail(address):
    with running_master(env={"NOTIFY_SOCKET": address}) as (process, _):
        assert end(process, signal.SIGTERM) == 0
        assert "service manager" in process.communicate()[1]


def test_a_closed_stdout_is_no_reason_to_end(tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [*WANCOLL, "master", "--listen", "127.0.0.1:0"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NOTIFY_SOCKET": manager.address},
    )
    os.close(writer)
    try:
        with manager.socket:
            manager.wait_for("READY=1")
            assert end(process, signal.SIGTERM) == 0
    finally:
        process.kill()
        errors = process.communicate()[1]
    assert "standard output cannot be written" in errors
    assert "Traceback" not in errors
    assert "BrokenPipeError" not in errors


# ---- errors to exit codes -----------------------------------------------------------------------------


def test_only_groups_of_nothing_but_expected_errors_are_expected():
    wrong, gone = ConfigError("a"), Evicted("b")
    assert expected_failures(wrong) == [wrong]
    assert expected_failures(ExceptionGroup("", [wrong, ExceptionGroup("", [gone])])) == [wrong, gone]
    assert expected_failures(ExceptionGroup("", [wrong, KeyError("a bug")])) == []
    assert expected_failures(ExceptionGroup("", [ExceptionGroup("", [KeyError("a bug")]), wrong])) == []
    assert expected_failures(KeyError("a bug")) == []


def test_an_error_is_one_printable_line():
    assert one_line(WancollError("first\n  second\x1b[0m", who="a")) == "a: first second?[0m"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_the_status_reader_may_leave_early():
    with running_master() as (_, address):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [*WANCOLL, "status", "--master", address],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=DEADLINE,
            check=False,
        )
        os.close(writer)
    assert done.stderr == b""


def test_no_variable_confirms_what_cannot_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """WANCOLL_YES may lie about, for another program or an earlier call."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        here = "{}:{}".format(*closed.getsockname())
    given = ["key", "rotate", f"--master={here}"]
    monkeypatch.setenv("WANCOLL_YES", "true")
    with pytest.raises(ConfigError, match="is not done without --yes"):
        app([*given, "--now"], result_action="return_value", exit_on_error=False, print_error=False)
    monkeypatch.setenv("WANCOLL_NOW", "true")
    with pytest.raises(ConfigError, match="--yes: says nothing here"):
        app([*given, "--yes"], result_action="return_value", exit_on_error=False, print_error=False)
    monkeypatch.setenv("WANCOLL_TIMEOUT", "never")  # others are taken from there
    with pytest.raises(CycloptsError, match="never"):
        app([*given, "--now"], result_action="return_value", exit_on_error=False, print_error=False)

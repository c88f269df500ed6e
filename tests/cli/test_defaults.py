"""What is in clear and what is sealed where nobody has said so, and what is refused; with real masters and daemons."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from cyclopts import CycloptsError

import wancoll
from tests.cli.test_cli import WANCOLL, end, said, started
from tests.owned import as_if_owned
from wancoll.cli import asking
from wancoll.cli.asking import Asking
from wancoll.cli.changing.evict import evict
from wancoll.cli.changing.token import create
from wancoll.cli.looking.status import find
from wancoll.cli.main import app
from wancoll.cli.running.master import _is_secure as is_secure
from wancoll.cli.running.peer import _listen as listen_of
from wancoll.errors import ConfigError, MasterUnreachable
from wancoll.limits import DEFAULT
from wancoll.native.engine import Engine
from wancoll.net.dial import DialFailed
from wancoll.net.listen import is_loopback_host
from wancoll.net.proof import make_receipt
from wancoll.net.wallet import Wallet
from wancoll.options import join_text
from wancoll.peer.config import PeerConfig
from wancoll.peer.links.hub import LinkHub
from wancoll.peer.links.probes import burst, probe, round_trip
from wancoll.trust.folder import own_folder
from wancoll.trust.identity import Identity
from wancoll.trust.keys import Key
from wancoll.trust.token import parse
from wancoll.wire import messages as m
from wancoll.wire.framing import encode
from wancoll_master.config import MasterConfig

TOKEN = f"WC2{'0' * 64}::abab.{'s' * 43}@h:9"


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True),
        ("", False), ("*", False), ("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("2001:db8::1", False),
        ("::ffff:192.0.2.1", False), ("nobody.invalid", False), ("no..name", False),
    ],
)  # fmt: skip
def test_which_hosts_mean_this_machine_alone(host: str, is_one: bool) -> None:
    assert is_loopback_host(host) == is_one


def test_a_name_is_this_machine_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"here": ["127.0.1.1", "::1"], "both": ["127.0.0.1", "192.0.2.1"], "far": ["fe80::1%eth0"]}
    look = lambda host, *_, **__: [(0, 0, 0, "", (address, 0)) for address in known[host]]  # noqa: E731
    monkeypatch.setattr("socket.getaddrinfo", look)
    assert [host for host in known if is_loopback_host(host)] == ["here"]


@pytest.mark.parametrize(
    ("host", "options", "makes"),
    [
        ("127.0.0.1", {}, False),
        ("127.0.0.1", {"secure": True}, True),
        ("", {}, True),
        ("0.0.0.0", {}, True),
        ("192.0.2.1", {}, True),
        ("192.0.2.1", {"insecure": True}, False),
    ],
)
def test_a_master_beyond_loopback_speaks_tls(host: str, options: dict[str, Any], makes: bool) -> None:
    assert is_secure(MasterConfig(**options), host) == makes


def test_what_a_master_cannot_be_at_once() -> None:
    with pytest.raises(ConfigError, match="--secure and --insecure exclude each other"):
        is_secure(MasterConfig(secure=True, insecure=True), "127.0.0.1")


@pytest.mark.parametrize(
    ("master", "options", "listen"),
    [
        ("127.0.0.1:7400", {}, "127.0.0.1:0"),
        ("localhost:7400,[::1]:7401", {}, "127.0.0.1:0"),
        ("127.0.0.1:7400", {"advertise": ("localhost", "[::1]:9")}, "127.0.0.1:0"),
        ("127.0.0.1:7400", {"listen": "[::1]:9"}, "[::1]:9"),
        ("127.0.0.1:7400", {"insecure": True}, "127.0.0.1:0"),
        ("127.0.0.1:7400", {"insecure": True, "advertise": ("192.0.2.1",)}, "*:0"),
        ("127.0.0.1:7400", {"insecure": True, "listen": "*:9"}, "*:9"),
        ("192.0.2.1:7400", {"insecure": True}, "*:0"),
        ("192.0.2.1:7400", {"join": TOKEN}, "*:0"),
        ("127.0.0.1:7400", {"join": TOKEN}, "*:0"),
        ("192.0.2.1:7400", {"join": TOKEN, "listen": "*:9"}, "*:9"),
    ],
)
def test_where_a_daemon_listens(master: str, options: dict[str, Any], listen: str) -> None:
    assert listen_of(PeerConfig(**options), master) == listen


@pytest.mark.parametrize(
    ("master", "options", "who"),
    [
        ("192.0.2.1:7400", {}, "--master 192.0.2.1:7400: goes beyond"),
        ("127.0.0.1:7400,far.invalid:7400", {}, "--master 127.0.0.1:7400,far.invalid:7400: goes beyond"),
        ("127.0.0.1:7400", {"listen": "*:9"}, "--listen *:9: goes beyond"),
        ("127.0.0.1:7400", {"listen": "0.0.0.0:9"}, "--listen 0.0.0.0:9: goes beyond"),
        ("127.0.0.1:7400", {"listen": ":9"}, "--listen :9: goes beyond"),
        ("127.0.0.1:7400", {"advertise": ("localhost", "192.0.2.1")}, "--advertise 192.0.2.1: goes beyond"),
    ],
)
def test_a_daemon_in_clear_stays_on_its_machine(master: str, options: dict[str, Any], who: str) -> None:
    """And both ways out are named."""
    with pytest.raises(ConfigError) as refused:
        listen_of(PeerConfig(**options), master)
    text = str(refused.value)
    for words in (
        who,
        "--join @FILE with the token that the master printed (or WANCOLL_JOIN",
        "`wancoll token create`",
        "--insecure (or WANCOLL_INSECURE",
    ):
        assert words in text


@pytest.mark.parametrize(("options", "near_only"), [({}, True), ({"insecure": True}, False), ({"join": TOKEN}, False)])
async def test_which_daemons_dial_lanes_beyond_their_machine(
    options: dict[str, Any], *, near_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever addresses a master names: for lanes, for probes, to measure."""
    dialled: list[str] = []

    async def connect(host: str, port: int) -> trio.SocketStream:
        dialled.append(host)
        raise OSError("nothing goes there in tests")

    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    far, ask = ["192.0.2.1:9"], m.MeasureLink("d2", ["192.0.2.1:9"], 1 << 20)
    config = PeerConfig(master="127.0.0.1:7400", **options)
    async with trio.open_nursery() as nursery:
        with Engine() as engine:
            connector = LinkHub(engine, config, "d1", nursery).connector
            for fail in (
                connector.open(far, 30.0), connector.dial(far, b"", 30.0), round_trip(connector, ask, 30.0),
                burst(connector, ask, 30.0, float("inf")),
            ):  # fmt: skip
                with pytest.raises(DialFailed, match="is beyond this machine" if near_only else "nothing goes there"):
                    await fail
            failed = await probe(connector, far, "d2", b"", DEFAULT)
            assert "is beyond this machine" in str(failed) or not near_only
    assert set(dialled) == (set() if near_only else {"192.0.2.1"})


@pytest.mark.parametrize("master", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_command_in_clear_does_not_leave_its_machine_for_the_word_of_a_standby(
    master: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    really, dialled = socket.create_connection, list[str]()

    def connect(where: tuple[str, int], timeout: float) -> socket.socket:
        dialled.append(where[0])
        if where[0] == "192.0.2.1":
            raise OSError("nothing goes there in tests")
        return really(where, timeout)

    def standby() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as one:
                    one.recv(4096)
                    one.sendall(encode(m.StandsBy("192.0.2.1:7400", 1)))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # no master's state is there
    monkeypatch.setattr(socket, "create_connection", connect)
    with socket.create_server(("127.0.0.2" if master == "127.0.0.2" else "127.0.0.1", 0)) as listener:
        address = f"{master}:{listener.getsockname()[1]}"
        thread = threading.Thread(target=standby)
        thread.start()
        try:
            why = f"192.0.2.1:7400: .*one beyond this machine, by the word of {address} alone"
            with pytest.raises(MasterUnreachable, match=why):
                find([address], Asking(timeout=20.0))
            with pytest.raises(MasterUnreachable, match=why):
                evict("m", group="g", master=address, asking=Asking(timeout=20.0))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert set(dialled) == {master}
    assert len(dialled) == 3, "find() asks twice"


def test_a_leader_is_asked_with_the_key_that_its_standby_was_asked_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They have one key; in clear it would not answer, and others would read it."""
    state, admin, master = tmp_path / "wancoll/master-7400", Key.new(), Key.new()
    state.mkdir(parents=True)
    (state / "admin.key").write_bytes(admin.pem)
    (state / "admin.key").chmod(0o600)
    (state / "master.pub").write_text(master.public.hex())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    proof = Asking(timeout=1.0).proof("127.0.0.1:7400")
    assert proof is not None
    assert (proof.key.public, proof.acceptors) == (admin.public, (master.public,))
    named = Asking().proof("192.0.2.1:7400", named_by="127.0.0.1:7400")
    assert named is not None
    assert (named.key.public, named.acceptors) == (admin.public, (master.public,))
    assert Asking().proof("192.0.2.1:7400", named_by="192.0.2.2:7401") is None, "that went beyond already"


SAID = {"master": "m:1,m:2", "state": "/nowhere"}


@pytest.mark.parametrize(
    ("master", "given", "asked"),
    [
        ("", {}, "m:1,m:2"), ("h", {}, "h:7400"), ("", {"join": TOKEN}, "h:9"), ("h:1", {"join": TOKEN}, "h:1"),
        ("", {"state": "s"}, "127.0.0.1:7400"),
    ],
)  # fmt: skip
def test_what_is_given_counts_before_this_machines_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, master: str, given: dict[str, str], asked: str
) -> None:
    own, signs = Wallet(str(tmp_path), None), Key.new()
    receipt = make_receipt([signs], Identity("d", "peer", (), "k3v9", own.key.public))
    own.keep(m.Admitted(receipt, [signs.public]))
    monkeypatch.setattr(asking, "ask", lambda *_, **__: m.LocalStatus(json.dumps({**SAID, "state": str(tmp_path)})))
    masters, who = Asking(**given).found(master)
    assert ",".join(masters) == asked
    assert who.own == ("" if master or given else str(tmp_path))
    if not master and not given:
        for proof in (who.proof("192.0.2.1:1"), who.proof("192.0.2.2:1", named_by="192.0.2.1:1")):
            assert proof is not None
            assert (proof.key.public, proof.receipt) == (own.key.public, receipt)


def test_without_options_and_a_daemon_that_can_be_asked_the_error_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(*_: Any, **__: Any) -> m.LocalStatus:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setenv("WANCOLL_SOCKET", "/s")
    older = json.dumps({"master": "m:1"})
    for answer, words in ((nobody, "/s: nobody listens"), (lambda *_, **__: m.LocalStatus(older), "/s: .state.")):
        monkeypatch.setattr(asking, "ask", answer)
        masters, who = Asking().found("")
        assert (masters, who.own) == (["127.0.0.1:7400"], "")
        assert re.search(words, who.way)
    monkeypatch.setattr(asking, "ask", lambda *_, **__: m.LocalStatus(json.dumps(SAID)))
    with pytest.raises(MasterUnreachable, match="m:1,m:2, named by the daemon at /s: cannot be asked as the daemon"):
        Asking().found("")


def test_a_daemon_is_not_sealed_and_in_clear_at_once() -> None:
    with pytest.raises(ConfigError, match="--insecure excludes --join"):
        listen_of(PeerConfig(insecure=True, join=TOKEN), "127.0.0.1:7400")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"group": ("",)},
            "--group: cannot be used; expected 1 to 128 printable characters; got ''; leave --group out",
        ),
        ({"group": ("a", "b\n")}, r"--group: cannot be used.*got 'b\\n'"),
        ({"group": ("a",) * 65}, "--group: is given too often; expected 64 times; got 65"),
        ({"name": "x" * 129}, "--name: cannot be used; expected 1 to 128"),
        ({"expires": 1e30}, "--expires: is too long; expected at most 315360000 s, ten years, .* got 1e[+]30"),
    ],
)
def test_what_a_token_cannot_be_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create(master="127.0.0.1:9", **options)


@pytest.mark.parametrize("uses", ["-1", "1025"])
def test_a_token_has_no_uses_that_no_master_takes(uses: str) -> None:
    with pytest.raises(CycloptsError, match="from 0 to 1024"):
        app(["token", "create", f"--uses={uses}"], exit_on_error=False, print_error=False)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(folder / "home"), "XDG_RUNTIME_DIR": str(folder), **more}


@pytest.mark.check
def test_a_master_beyond_loopback_lets_in_who_has_its_token_and_nobody_else(tmp_path: Path) -> None:
    env, peer = environment(tmp_path), [*WANCOLL, "peer", "--name", "p", "--socket", str(tmp_path / "s")]
    listen = ["--listen", "*:0", "--journal", "none"]
    with started(*WANCOLL, "master", *listen, "--state", str(tmp_path / "master"), env=env) as master:
        invited = re.fullmatch(r"wancoll peer --join (WC2\S+)", said(master))
        assert master.stdout is not None
        ready = re.fullmatch(r"wancoll master ready \S+:(\d+)\n", master.stdout.readline())
        assert invited
        assert ready
        # The address in the token is that of the machine's network: where there is none, --master says another.
        token, here = invited[1], f"127.0.0.1:{ready[1]}"
        with started(*peer, "--master", here, env=env | {"WANCOLL_JOIN": token}) as daemon:
            assert said(daemon).startswith("wancoll peer started ")
            assert daemon.stdout is not None
            assert daemon.stdout.readline().startswith("wancoll peer ready ")
            command = Path(f"/proc/{daemon.pid}/cmdline").read_bytes()
            assert token.encode() not in command
            assert end(daemon, signal.SIGTERM) == 0
        id, secret = token.split("::")[1].partition("@")[0].split(".")
        wrong = token.replace(secret, "x" * 43)
        with started(*peer, "--master", here, "--state", str(tmp_path / "w"), "--join", wrong, env=env) as daemon:
            assert daemon.wait(20) == 2
            assert f"token {id}: is not known, or its secret is wrong" in daemon.communicate()[1]
        with started(*peer, "--master", here, env=env) as daemon:  # in clear
            assert said(daemon).startswith("wancoll peer started ")
            assert heard(daemon, "this master speaks TLS only; give --join or WANCOLL_JOIN a token")
        assert heard(master, "it does not speak TLS: either it was started in clear")


@pytest.mark.check
def test_a_master_in_clear_and_a_daemon_with_a_token_both_say_so(tmp_path: Path) -> None:
    env = environment(tmp_path)
    with started(*WANCOLL, "master", "--listen", "*:0", "--insecure", "--journal", "none", env=env) as master:
        ready = re.fullmatch(r"wancoll master ready \S+:(\d+)", said(master))  # and no token before
        assert ready
        peer = [*WANCOLL, "peer", "--socket", str(tmp_path / "s"), "--master", f"127.0.0.1:{ready[1]}"]
        with started(*peer, "--join", TOKEN, env=env) as daemon:
            assert said(daemon).startswith("wancoll peer started ")
            assert heard(daemon, "it does not speak TLS: either it was started in clear")
        assert heard(master, "speaks TLS, and this master does not; start the master with --secure")


def heard(process: Any, words: str) -> bool:
    """Whether a line of its log has the *words*; waits for it, as long as the test has."""
    return any(words in line for line in process.stderr)


def test_a_private_master_beyond_loopback_gives_a_token_that_its_environment_alone_shows(tmp_path: Path) -> None:
    from wancoll.client.private import PrivateDaemon, PrivateMaster

    master = PrivateMaster("*:0")
    try:
        assert master.token.startswith("WC2")
        daemon = PrivateDaemon(f"127.0.0.1:{master.port}", token=master.token)
        try:
            assert daemon._process is not None
            place = Path(f"/proc/{daemon._process.pid}")
            assert master.token.encode() not in (place / "cmdline").read_bytes()
            assert f"WANCOLL_JOIN={master.token}".encode() in (place / "environ").read_bytes().split(b"\0")
        finally:
            daemon.stop()
    finally:
        master.stop()
    here = PrivateMaster("127.0.0.1:0")
    try:
        assert here.token == ""
    finally:
        here.stop()


@pytest.mark.check
def test_a_private_master_left_to_itself_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wancoll.client import private

    for name, value in {"TMPDIR": str(tmp_path), "WANCOLL_SECURE": "true", "WANCOLL_STATE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(private, "_UNUSED_SECONDS", 0.5)
    master = private.PrivateMaster("127.0.0.1:0")
    process = master._process
    assert process is not None
    try:
        daemon = private.PrivateDaemon(f"127.0.0.1:{master.port}", token=master.token)
        try:
            wancoll.connect(socket=daemon.socket, start_world=1).close()  # the daemon has joined
            master.leave()
        finally:
            daemon.stop()
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_keys_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    from wancoll_master.gate import Gate
    from wancoll_master.store.journal import Journal

    made = tmp_path / "made"
    own_folder(str(made))
    assert made.stat().st_mode & 0o777 == 0o700
    own_folder(str(made))
    for mode in (0o720, 0o702, 0o1777):
        os.chmod(made, mode)
        with pytest.raises(ConfigError, match=r"--state .*: is a folder in which others may .* chown, chmod 700"):
            own_folder(str(made))
        with pytest.raises(ConfigError, match="in which others may replace the keys"):  # of a master
            Gate(str(made), Journal(""))
        wallet = Wallet(str(made), parse(TOKEN))
        with pytest.raises(ConfigError, match="in which others may replace the keys"):  # of a daemon
            wallet.held("d").__enter__()
        with pytest.raises(ConfigError, match="in which others may replace the keys"):  # of a command
            assert wallet.key
    assert list(made.iterdir()) == []


@pytest.mark.parametrize(("owner", "good"), [(0, True), (7, True), (8, False)])
def test_a_folder_for_keys_is_its_users_or_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, good: bool
) -> None:
    (made := tmp_path / "made").mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        as_if_owned(patch, owner, user=7)
        if good:
            own_folder(str(made))
            return
        with pytest.raises(
            ConfigError, match=r"expected one of user 7 or root, that .*; got drwx------ of user 8; choose"
        ):
            own_folder(str(made))


@pytest.mark.parametrize("given", [["--join", TOKEN], [f"--join={TOKEN}"]], ids=["apart", "together"])
def test_a_token_that_was_an_argument_is_none_of_the_running_daemon(tmp_path: Path, given: list[str]) -> None:
    peer = [*WANCOLL, "peer", "--socket", str(tmp_path / "s"), "--master", "127.0.0.1:1", "--name", "p", *given]
    with started(*peer, env=environment(tmp_path)) as daemon:
        assert said(daemon).startswith("wancoll peer started ")
        place = Path(f"/proc/{daemon.pid}")
        arguments = (place / "cmdline").read_bytes().split(b"\0")
        assert not any(b"WC2" in one or one == b"--join" for one in arguments)
        assert arguments[-3:-1] == [b"--name", b"p"]
        assert f"WANCOLL_JOIN={TOKEN}".encode() in (place / "environ").read_bytes().split(b"\0")
        assert end(daemon, signal.SIGTERM) == 0


def test_a_token_comes_from_a_file_that_is_its_users_alone_or_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"/token: is a token that others may read .*-rw-r-----"):
        join_text(f"@{file}")
    file.chmod(0o600)
    assert join_text(f"@{file}") == TOKEN
    with pytest.raises(ConfigError, match=r"--join @.*none: cannot be read; expected a file with a token"):
        join_text(f"@{file}none")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOKEN}\nmore\n"))
    assert [join_text("-"), join_text("-")] == [TOKEN, TOKEN], "it is read once"
    assert (join_text(TOKEN), join_text("")) == (TOKEN, "")

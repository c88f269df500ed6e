"""The page's port against viewers, and against those who are none."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from typing import Any

import pytest
import trio

import wancoll_master
from tests.http_port import get, logged, say, served
from tests.page.support import frames
from wancoll.errors import ConfigError
from wancoll.metrics import guard
from wancoll.metrics.guard import listeners_for
from wancoll.net import http
from wancoll_master import page as page_module
from wancoll_master.core.views.page import Section
from wancoll_master.page import MOST_VIEWERS, Page

TOKEN = "a-token-of-24-characters"
NAME = "<script>alert(1)</script>"


class Server:
    """A page of a master that tells how often it was looked at."""

    def __init__(self, sockets: list[socket.socket], token: str) -> None:
        self.looks, self.big, self.steady = 0, 0, False
        self.page = Page(self.look, sockets, token)
        self.address = sockets[0].getsockname()
        self.stopped = trio.Event()

    def look(self) -> Iterator[Section | None]:
        self.looks += 1
        yield "top", {"well": True, "line": NAME, "groups": ["g"]}
        yield None
        yield "g/g/now", {"looks": 0 if self.steady else self.looks}
        yield "g/g/history", [self.looks]
        if self.big:
            yield "g/g/big", [self.looks, "x" * self.big]

    async def say(self, *parts: bytes) -> bytes:
        return await say(self.address, *parts)

    @contextlib.asynccontextmanager
    async def viewer(self) -> AsyncIterator[Viewer]:
        async with await trio.open_tcp_stream(*self.address) as stream:
            await stream.send_all(get("/events"))
            yield Viewer(stream)


class Viewer:
    """Reads what it is told."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream, self.text = stream, b""

    async def frames(self, count: int) -> list[dict[str, Any]]:
        """All so far, once there are so many."""
        while len(found := frames(self.text)) < count:
            data = await self.stream.receive_some()
            assert data, self.text
            self.text += data
        return found


@contextlib.asynccontextmanager
async def serving(token: str = "") -> AsyncIterator[Server]:
    sockets = listeners_for("page", "127.0.0.1:0", token, "wancoll_master.page")
    server = Server(sockets, token)
    async with served(sockets, server.page.serve):
        yield server


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lines of the log, of all levels; looks are quick."""
    lines = logged(monkeypatch, http)
    monkeypatch.setattr(page_module, "_LOOK", 0.02)
    monkeypatch.setattr(page_module, "_SHARE", 1.0)
    return lines


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def test_the_files_are_whole_and_load_nothing_from_elsewhere() -> None:
    async with serving() as server:
        for path, kind in (("/", b"text/html"), ("/page.css", b"text/css"), ("/page.js", b"text/javascript")):
            head, _, text = (await server.say(get(path))).partition(b"\r\n\r\n")
            assert status(head) == 200
            assert b"content-type: " + kind in head.lower()
            assert b"content-security-policy: default-src 'none'; script-src 'self'" in head.lower()
            assert b"cache-control: no-store" in head.lower()
            assert b"unsafe" not in head
            outside = text.replace(b"http://www.w3.org/2000/svg", b"")
            assert b"http:" not in outside
            assert b"https:" not in outside
            assert b"innerHTML" not in text
            assert (await server.say(get(path, "HEAD"))).partition(b"\r\n\r\n")[2] == b""
        assert b"<style" not in (await server.say(get("/")))
        assert server.looks == 0


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a", "b", "worker-twelve"], ["a", "b", "work…twelve"]),
        (["vm-train-4711-3f2a-1", "vm-train-4712-77aa-1"], ["…4711-3f2a…", "…4712-77aa…"]),
        (["node-1-of-the-west", "node-2-of-the-west"], ["…1…", "…2…"]),
        (["alpha-train-4711-3f2a-1", "alpha-train-99-77aa-1", "beta-x"], ["alph…3f2a-1", "alph…77aa-1", "beta-x"]),
        (["vm-train-4711-3f2a-1"], ["vm-t…3f2a-1"]),
        ([], []),
    ],
)
def test_labels_are_cut_where_they_are_alike(names: list[str], shown: list[str]) -> None:
    page = resources.files(wancoll_master).joinpath("static/page.js").read_text()
    found = re.search(r"^function cut\(.*?^}", page, re.DOTALL | re.MULTILINE)
    assert found
    script = f"{found[0]}\nconsole.log(JSON.stringify(cut({json.dumps(names)}, 11)))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == shown


async def test_a_viewer_is_told_what_changes_and_nothing_is_looked_at_without_one() -> None:
    async with serving() as server:
        async with server.viewer() as viewer:
            first, *rest = await viewer.frames(3)
            assert first["top"]["line"] == NAME
            assert first["g/g/history"]
            assert first["at"] > 1e9
            looks = [first["g/g/now"]["looks"]] + [one["g/g/now"]["looks"] for one in rest]
            assert looks == sorted(set(looks))
            for one in rest:
                assert set(one) == {"at", "g/g/now"}  # what stays is told once; the past goes on with what is new
            head = viewer.text.partition(b"\r\n\r\n")[0].lower()
            assert b"content-type: text/event-stream" in head
        while server.page._viewers:  # noqa: ASYNC110 - of a viewer that goes there is no event
            await trio.sleep(0.01)
        while server.page._sections:  # noqa: ASYNC110
            await trio.sleep(0.01)
        looks_then = server.looks
        await trio.sleep(0.1)
        assert server.looks == looks_then


async def test_all_viewers_share_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_LOOK", 3600.0)
    async with serving() as server, contextlib.AsyncExitStack() as stack:
        viewers = [await stack.enter_async_context(server.viewer()) for _ in range(5)]
        assert len({json.dumps((await one.frames(1))[0]["g/g/now"]) for one in viewers}) == 1
        assert server.looks == 1


async def test_without_news_a_viewer_hears_that_the_master_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_QUIET", 0.05)
    async with serving() as server:
        server.steady = True
        monkeypatch.setattr(server, "look", lambda: iter([("top", {})]))
        server.page._source = server.look
        async with server.viewer() as viewer:
            found = await viewer.frames(3)
            assert [set(one) for one in found[1:]] == [{"at"}] * (len(found) - 1)


@pytest.mark.check
async def test_a_viewer_that_does_not_read_is_cut_off_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(http, "_WRITE_SECONDS", 2.5)
    async with serving() as server:
        server.big = 1 << 20
        async with server.viewer() as one, server.viewer() as other:
            await one.frames(1)
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    while data := await one.stream.receive_some():
                        assert data

                nursery.start_soon(read)
                with trio.fail_after(30):
                    while server.page._viewers > 1:  # noqa: ASYNC110 - of a viewer that goes there is no event
                        await trio.sleep(0.02)
                text = b""
                with trio.fail_after(30), contextlib.suppress(trio.BrokenResourceError):
                    while data := await other.stream.receive_some():  # what was on its way, and the end
                        text += data
                nursery.cancel_scope.cancel()
            assert server.page._viewers == 1
    assert [line for line in said if "cut off" in line["event"]]
    assert not [line for line in said if line["level"] == "error"], said


async def test_so_many_viewers_and_no_more(said: list[dict[str, Any]]) -> None:
    async with serving() as server, contextlib.AsyncExitStack() as stack:
        viewers = [await stack.enter_async_context(server.viewer()) for _ in range(MOST_VIEWERS)]
        for one in viewers:
            await one.frames(1)
        assert status(await server.say(get("/events"))) == 503
        assert status(await server.say(get("/"))) == 200
        assert len(server.page._port.open) <= 2  # viewers take no room from those who ask


async def test_no_more_viewers_come_in_at_once() -> None:
    async with serving() as server, contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(await trio.open_tcp_stream(*server.address))
            for _ in range(MOST_VIEWERS + 20)
        ]
        for stream in streams:
            stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for stream in streams:
            await stream.socket.send(get("/events"))
        answers = [await stream.receive_some() for stream in streams]
        assert sum(b"retry: " in answer for answer in answers) == server.page._viewers == MOST_VIEWERS


async def test_a_bug_in_what_a_viewer_is_told_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any]]
) -> None:
    async with serving() as server:
        bugs = server.page._port.bugs
        bugs._at, bugs._credit = trio.current_time(), -1e6  # there were many lines before
        monkeypatch.setattr(server.page, "_frame", lambda known: 1 / 0)
        assert status(await server.say(get("/events"))) == 200
        assert bugs.count == 1
    assert [line["event"] for line in said] == ["page"]


async def test_the_end_of_the_page_waits_for_no_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_WRITE_SECONDS", 3600.0)
    with trio.fail_after(20):
        async with contextlib.AsyncExitStack() as stack, serving() as server:
            server.big = 1 << 23  # more than the kernel takes
            await stack.enter_async_context(server.viewer())  # reads nothing
            while server.looks < 3:  # noqa: ASYNC110
                await trio.sleep(0.01)


HOSTILE = {
    "post": (get("/", "POST", "Content-Length: 3") + b"abc", 405),
    "connect": (get("/", "CONNECT"), 405),
    "options": (get("*", "OPTIONS"), 400),
    "a body": (get("/", "GET", "Content-Length: 3") + b"abc", 400),
    "a body without end": (get("/", "GET", "Transfer-Encoding: chunked") + b"ffffffff\r\n", 400),
    "upgrade to a socket": (get("/events", "GET", "Connection: Upgrade", "Upgrade: websocket"), 400),
    "upgrade to http 2": (get("/", "GET", "Connection: Upgrade", "upgrade : h2c", "HTTP2-Settings: AAMAAABk"), 400),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(2000), 400),
    "path up": (get("/../page.js"), 404),
    "path up and down": (get("/page.js/../../etc/passwd"), 404),
    "path escaped": (get("/%2e%2e/page.js"), 404),
    "path of no text": (get("/%ff%fe"), 404),
    "path doubled": (get("//elsewhere.example/"), 404),
    "path with a slash more": (get("/events/"), 404),
    "folder": (get("/static/page.js"), 404),
    "path with a zero": (b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "another's address": (get("http://elsewhere/"), 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "no name": (b"GET / HTTP/1.0\r\n\r\n", 403),
    "folded header": (b"GET / HTTP/1.1\r\nHost: h\r\n folded\x00\r\n\r\n", 400),
    "length twice": (get("/", "GET", "Content-Length: 1", "Content-Length: 2"), 400),
    "length is none": (get("/", "GET", "Content-Length: many"), 400),
    "two hosts": (get("/", "GET", "Host: localhost"), 400),
    "a bare line feed ends the head": (b"GET / HTTP/1.1\r\nHost: localhost\n\n" + get("/page.css"), 400),
    "a bare line feed ends a line": (b"GET / HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n", 400),
    "a bare carriage return": (b"GET / HTTP/1.1\r\nHost: localhost\rX: y\r\n\r\n", 400),
    "garbage": (b"\xff\x00\x01garbage\r\n\r\n", 400),
    "tls": (bytes.fromhex("160301020001000001fc0303") + bytes(200) + b"\r\n\r\n", 400),
    "another's name": (get("/", host="evil.example"), 403),
    "a name like ours": (get("/", host="localhost.evil.example:80"), 403),
    "an address of others": (get("/", host="192.0.2.1"), 403),
    "huge header": (get("/", "GET", "X: " + "x" * 100_000), 431),
    "huge path": (b"GET /" + b"x" * 100_000, 431),
    "many headers": (get("/", "GET", *[f"X{i}: 1" for i in range(5000)]), 431),
    "a head of twice the size": (get("/", "GET", "X: " + "x" * 8180), 431),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_no_request_for_the_page_changes_nothing(name: str, said: list[dict[str, Any]]) -> None:
    sent, expected = HOSTILE[name]
    async with serving() as server:
        answer = await server.say(sent)
        assert status(answer) == expected, answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"wancoll" not in answer or expected in (401, 403)
        assert server.looks == 0
        assert status(await server.say(get("/"))) == 200
    assert not [line for line in said if line["level"] == "error"], said
    assert len(str(said)) < 1000


async def test_who_expects_a_word_before_its_request_is_refused() -> None:
    async with serving() as server:
        assert status(await server.say(get("/page.css", "GET", "Expect: 100-continue"))) == 400


async def test_of_requests_in_a_row_the_first_is_answered() -> None:
    async with serving() as server:
        answer = await server.say(get("/page.css") + get("/") * 50)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"<html" not in answer


async def test_a_bug_that_everybody_can_cause_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any]]
) -> None:
    async with serving() as server:
        bugs = server.page._port.bugs
        bugs._at, bugs._credit = trio.current_time(), -1e6  # there were many lines before

        def raises(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(page_module, "refused", raises)
        assert status(await server.say(get("/"))) == 500
        assert bugs.count == 1
    assert [line["event"] for line in said] == ["page"]


async def test_who_is_slow_is_cut_off(monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(http, "_SECONDS", 0.3)
    async with serving() as server:
        with trio.fail_after(20):
            assert await server.say(b"GET / HT") == b""  # the rest never comes
            assert await server.say() == b""
    assert [line["event"] for line in said] == ["page", "request refused", "request refused"]


async def test_a_crowd_of_slow_ones_does_not_keep_a_viewer_out(
    monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(http, "_LEAST", 0.0)
    async with serving() as server, contextlib.AsyncExitStack() as stack, server.viewer() as viewer:
        await viewer.frames(1)
        for _ in range(3 * http.CONNECTIONS):
            stream = await stack.enter_async_context(await trio.open_tcp_stream(*server.address))
            await stream.send_all(b"GET /")
            await trio.testing.wait_all_tasks_blocked()
            assert len(server.page._port.open) <= http.CONNECTIONS
        assert status(await server.say(get("/"))) == 200
        await viewer.frames(len(frames(viewer.text)) + 1)
        assert {line["reason"] for line in said if "reason" in line} == {"gave way to another connection"}
    assert len(said) <= 1 + 20


def basic(text: str) -> str:
    return f"Authorization: Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("path", ["/", "/page.js", "/events", "/nothing"])
@pytest.mark.parametrize(
    ("headers", "good"),
    [
        ([], False),
        (["Authorization: Basic"], False),
        (["Authorization: Basic !!!"], False),
        ([basic("me")], False),
        ([basic(f"me:{TOKEN}x")], False),
        ([basic(f"{TOKEN}:me")], False),
        ([f"Authorization: Basic {TOKEN}"], False),
        ([basic(f"me:{TOKEN}"), basic("me:no")], False),
        ([basic("me:no"), basic(f"me:{TOKEN}")], False),
        ([basic(f"me:{TOKEN}")], True),
        ([basic(f":{TOKEN}")], True),
        ([f"authorization: bearer {TOKEN}"], True),
    ],
)
async def test_only_who_shows_the_token_looks(
    path: str, headers: list[str], good: bool, said: list[dict[str, Any]]
) -> None:
    async with serving(TOKEN) as server, await trio.open_tcp_stream(*server.address) as stream:
        await stream.send_all(get(path, "GET", *headers, host="master.example"))
        answer = await stream.receive_some()
        assert status(answer) == (401 if not good else 404 if path == "/nothing" else 200)
        assert (b"WWW-Authenticate: Basic".lower() in answer.lower()) != good
        if not good:
            assert server.looks == 0
    assert TOKEN not in str(said)


@pytest.mark.parametrize("where", ["*:0", "0.0.0.0:0"])
def test_beyond_loopback_a_token_is_needed(where: str) -> None:
    with pytest.raises(ConfigError, match="WANCOLL_PAGE_TOKEN"):
        listeners_for("page", where, "", "wancoll_master.page")
    for one in listeners_for("page", where, TOKEN, "wancoll_master.page"):
        one.close()
    with pytest.raises(ConfigError, match="WANCOLL_PAGE_TOKEN"):
        listeners_for("page", "127.0.0.1:0", "short", "wancoll_master.page")


def test_a_name_of_loopback_and_of_another_address_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    def both(_: str) -> list[socket.socket]:
        made[:] = [socket.create_server((host, 0)) for host in ("127.0.0.1", "0.0.0.0")]
        return made

    monkeypatch.setattr(guard, "open_listeners", both)
    with pytest.raises(ConfigError, match=r"--page n:7: would tell everybody who reaches it; .*127\.0\.0\.1:7 is for"):
        listeners_for("page", "n:7", "", "wancoll_master.page")
    assert [one.fileno() for one in made] == [-1, -1]
    for one in listeners_for("page", "n:7", TOKEN, "wancoll_master.page"):
        one.close()


@pytest.mark.parametrize(("hosts", "status"), [(["localhost:1"], 0), (["localhost", "evil.example"], 403), ([], 403)])
def test_without_a_token_one_name_of_this_machine_is_asked_for(hosts: list[str], status: int) -> None:
    """Also where what reads the request lets two of them through: h11 does not."""
    for given in (hosts, hosts[::-1]):
        answer = http.refused(http.Request("/", {"host": given}), b"", "")
        assert (answer.status if answer else 0) == status


def test_without_the_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listeners_for("page", "", "", "wancoll_master.page") == []
    monkeypatch.setitem(__import__("sys").modules, "wancoll_master.page", None)
    monkeypatch.delattr("wancoll_master.page", raising=False)
    with pytest.raises(ConfigError, match=r"\[page\]"):
        listeners_for("page", "127.0.0.1:0", "", "wancoll_master.page")


class Steps(trio.abc.Instrument):
    """The longest turn of a task, in seconds of the processor: others' work on a busy machine does not count."""

    def __init__(self) -> None:
        self.longest, self._began = 0.0, time.thread_time()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, time.thread_time() - self._began)


async def test_no_request_holds_up_what_else_the_master_does() -> None:
    async with serving() as server, server.viewer() as viewer:
        await viewer.frames(1)
        for sent, _ in HOSTILE.values():
            await server.say(sent)  # what is loaded at first use is
        gc.collect()
        longest = []
        while not longest or (min(longest) >= 0.02 and len(longest) < 10):  # a busy machine is slow now and then
            steps = Steps()
            trio.lowlevel.add_instrument(steps)
            for sent, _ in HOSTILE.values():
                await server.say(sent)
            await server.say(b"GET / HTTP/1.1\r\n", *[b"X: y\r\n"] * 1000, b"\r\n")
            await server.say(*[bytes([one]) for one in get("/page.js")])
            trio.lowlevel.remove_instrument(steps)
            longest.append(steps.longest)
        assert min(longest) < 0.02, longest  # 1 ms where nothing else runs

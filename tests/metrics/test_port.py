"""The port of metrics against readers, and against those who are none."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http_port import get, logged, say, served
from tests.metrics.support import Scrape
from wancoll.errors import ConfigError
from wancoll.metrics import port as port_module
from wancoll.metrics.core import families as f
from wancoll.metrics.guard import listeners_for
from wancoll.metrics.port import MetricsPort, Source
from wancoll.net import http

TOKEN = "a-token-of-24-characters"


class Server:
    """A port of a process that tells how often it was asked."""

    def __init__(self, sockets: list[socket.socket], token: str) -> None:
        self.asked, self.why = 0, ""
        self.port = MetricsPort(Source("peer", "generic", self.families, lambda: self.why), sockets, token)
        self.address = sockets[0].getsockname()

    def families(self) -> Iterator[f.Family | None]:
        self.asked += 1
        yield f.Family(f.CLIENTS, [((), self.asked)])
        yield None

    async def say(self, *parts: bytes) -> bytes:
        return await say(self.address, *parts)


@contextlib.asynccontextmanager
async def serving(token: str = "") -> AsyncIterator[Server]:
    sockets = listeners_for("metrics", "127.0.0.1:0", token, "wancoll.metrics.port")
    server = Server(sockets, token)
    async with served(sockets, server.port.serve):
        yield server


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lines of the log, of all levels."""
    return logged(monkeypatch, http)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


async def test_a_reader_gets_what_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_SHARE", 1.0)
    async with serving() as server:
        for times in (1, 2):
            answer = await server.say(get("/metrics?x=1"))
            assert status(answer) == 200
            found = Scrape(body(answer).decode())
            assert found.value("wancoll_clients") == times
            assert found.value("wancoll_uptime_seconds") >= 0
            assert found.all("wancoll_build_info")
            head, _, nothing = (await server.say(get("/metrics", "HEAD"))).partition(b"\r\n\r\n")
            assert b"Content-Length: " in head
            assert nothing == b""
            server.asked -= 1
        assert status(await server.say(get("/healthz"))) == 200
        assert status(await server.say(get("/readyz"))) == 200
        server.why = "no master answers"
        answer = await server.say(get("/readyz"))
        assert (status(answer), body(answer)) == (503, b"no master answers\n")
        assert status(await server.say(get("/healthz"))) == 200


async def test_who_asks_over_and_over_shares_a_text() -> None:
    async with serving() as server:
        server.port._good_until = trio.current_time()
        await server.say(get("/metrics"))
        server.port._good_until = trio.current_time() + 60
        for _ in range(20):
            assert Scrape(body(await server.say(get("/metrics"))).decode()).value("wancoll_clients") == 1
        assert server.asked == 1


async def test_texts_take_a_twentieth_of_the_time(mock_clock: MockClock) -> None:
    async with serving() as server:
        whole = server.families

        def slow() -> Iterator[f.Family | None]:
            mock_clock.jump(1.0)
            yield from whole()

        server.port._source.families = slow
        for asked, later in ((1, 18.9), (1, 0.2), (2, 18.9), (2, 0.2), (3, 0.0)):
            found = Scrape(body(await server.say(get("/metrics"))).decode())
            assert found.value("wancoll_clients") == asked
            mock_clock.jump(later)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], 401),
        (["Authorization: Bearer"], 401),
        (["Authorization: Bearer no"], 401),
        ([f"Authorization: Basic {TOKEN}"], 401),
        ([f"Authorization: Bearer {TOKEN}x"], 401),
        ([f"Authorization: Bearer {TOKEN}", "Authorization: Bearer no"], 401),
        (["Authorization: Bearer no", f"Authorization: Bearer {TOKEN}"], 401),
        ([f"Authorization: Bearer {TOKEN}"], 200),
        ([f"authorization: bearer {TOKEN}"], 200),
    ],
)
async def test_only_who_shows_the_token_reads(headers: list[str], expected: int, said: list[dict[str, Any]]) -> None:
    async with serving(TOKEN) as server:
        answer = await server.say(get("/metrics", "GET", *headers, host="worker.example"))
        assert status(answer) == expected
        assert (b"wancoll_" in answer) == (expected == 200)
        assert server.asked == (expected == 200)
        assert status(await server.say(get("/healthz"))) == 200  # probes have no token
    assert len(said) == 1 + (expected != 200)
    assert TOKEN not in str(said)


# What else HTTP has to refuse is asked of the page's port (tests/page/test_site.py): both are wancoll/net/http.py.
REFUSED = {
    "post": (get("/metrics", "POST", "Content-Length: 3") + b"abc", 405),
    "path escaped": (get("/%6detrics"), 404),
    "another's name": (get("/metrics", host="evil.example"), 403),
    "no name": (b"GET /metrics HTTP/1.0\r\n\r\n", 403),
    "garbage": (b"\xff\x00\x01garbage\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_no_request_for_metrics_is_counted_and_changes_nothing(
    name: str, said: list[dict[str, Any]]
) -> None:
    sent, expected = REFUSED[name]
    async with serving() as server:
        answer = await server.say(sent)
        assert status(answer) == expected
        assert b"wancoll_" not in answer
        assert server.asked == 0
        found = Scrape(body(await server.say(get("/metrics"))).decode())
        assert found.value("wancoll_scrapes_refused_total") == 1
    assert [line["event"] for line in said] == ["metrics", "request refused"]
    assert len(str(said[1])) < 500


async def test_who_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(http, "_SECONDS", 0.3)
    async with serving() as server:
        monkeypatch.setattr(port_module.MetricsPort, "_metrics", big)
        async with await trio.open_tcp_stream(*server.address) as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await stream.send_all(get("/metrics"))
            with trio.fail_after(10):
                while len(said) < 2:  # noqa: ASYNC110 - of the log there is no event
                    await trio.sleep(0.01)
    assert [line.get("reason") for line in said] == [None, "was not done in time"]


async def big(_: MetricsPort) -> bytes:
    return bytes(64 << 20)


async def test_a_bug_in_what_is_told_ends_that_request_alone(said: list[dict[str, Any]]) -> None:
    async with serving() as server:
        monkey = server.port._source
        whole, monkey.families = monkey.families, lambda: iter([1 / 0])
        assert status(await server.say(get("/metrics"))) == 500
        monkey.families = whole
        assert status(await server.say(get("/metrics"))) == 200


async def test_other_tasks_run_between_pieces_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = f.WAITED_FOR
    rows = [(("group", f"member-{i}"), i) for i in range(3000)]
    async with serving() as server:
        monkeypatch.setattr(server.port._source, "families", lambda: iter([f.Family(spec, rows)]))
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += server.port._making.locked()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            found = Scrape(body(await server.say(get("/metrics"))).decode())
            nursery.cancel_scope.cancel()
        assert len(found.all(spec.name)) == 3000
        assert turns >= 30


@pytest.mark.parametrize(
    "token", ["short", "with spaces in the middle", "nicht-nur-ascii-zeichen-ß", "line\nbreak-line-break"]
)
def test_a_token_is_one_that_nobody_guesses_and_a_header_carries(token: str) -> None:
    with pytest.raises(ConfigError, match="WANCOLL_METRICS_TOKEN") as refused:
        listeners_for("metrics", "127.0.0.1:0", token, "wancoll.metrics.port")
    assert token not in str(refused.value)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listeners_for("metrics", "", "", "wancoll.metrics.port") == []
    monkeypatch.setitem(__import__("sys").modules, "wancoll.metrics.port", None)
    monkeypatch.delattr("wancoll.metrics.port", raising=False)
    with pytest.raises(ConfigError, match="metrics"):
        listeners_for("metrics", "127.0.0.1:0", "", "wancoll.metrics.port")

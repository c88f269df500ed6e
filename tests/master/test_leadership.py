"""Who leads of several masters, and until when: arithmetic, a store that writes later, elections in a real etcd."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.master.lease import TTL, Later, quick_elections
from tests.master.test_master import PATIENT, Connect, Peer, hello, master
from wancoll import chaos
from wancoll.cli.asking import Asking
from wancoll.cli.looking import status
from wancoll.errors import ConfigError, MasterUnreachable
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.net import clock
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.core.liveness import masters
from wancoll.peer.core.liveness.masters import Masters
from wancoll.wire import messages as m
from wancoll.wire.framing import encode
from wancoll_master import election
from wancoll_master.config import EtcdConfig, MasterConfig
from wancoll_master.core.leadership import SAFETY, Leadership
from wancoll_master.core.ready import JUMP, Announce, Broadcast, Close, Former, Held, Persist, Ready, Record, Send, Used
from wancoll_master.election import give_back, whereabouts
from wancoll_master.serve import reached_at, serve
from wancoll_master.server import Server
from wancoll_master.store import etcd as etcd_module
from wancoll_master.store import etcd_store
from wancoll_master.store.etcd import (
    Entry,
    Etcd,
    EtcdError,
    Lease,
    TxnAnswer,
    check_endpoints,
    created,
    delete,
    modified,
    put,
)
from wancoll_master.store.etcd_store import (
    Deposed,
    EtcdStore,
    Keys,
    Leader,
    Numbers,
    Unreadable,
    read,
    text,
)
from wancoll_master.store.facts import Facts, used_from
from wancoll_master.store.journal import Journal

ASKED = Asking(timeout=5.0)

# ---- until when -----------------------------------------------------------------------------------------


def test_a_leader_counts_from_when_it_sent() -> None:
    leadership = Leadership(2.0, 10.0)
    assert leadership.holds(11.79)
    assert not leadership.holds(11.8)
    leadership.renewed(2.0, 10.7)
    assert leadership.until == pytest.approx(12.5)
    assert leadership.renew_at == pytest.approx(10.7 + 2 / 3)
    leadership.renewed(2.0, 10.2)  # its answer was overtaken
    assert leadership.until == pytest.approx(12.5)
    leadership.renewed(1.0, 12.0)  # the keeper gives less
    assert leadership.until == pytest.approx(12.9)
    leadership.over()
    assert not leadership.holds(-inf)


@given(
    st.floats(1, 60),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 10), st.floats(0, 10)), max_size=20),
    st.floats(0, 10),
)
def test_the_leader_stops_before_the_keeper_counts_it_out(
    ttl: float, renewals: list[tuple[float, float, float]], first: float
) -> None:
    """Whatever the network does: renewals are pauses, ways there and ways back."""
    at, expires = 0.0, first + ttl
    leadership = Leadership(ttl, at)
    assert leadership.until < expires
    for pause, there, back in renewals:
        at += pause
        if at + there < expires:  # the keeper hears it in time
            expires = max(expires, at + there + ttl)
            leadership.renewed(ttl, at)
        assert leadership.until < expires
        assert not leadership.holds(expires)
        at += back
    assert leadership.until <= at + ttl * (1 - SAFETY)


# ---- which master a daemon tries ------------------------------------------------------------------------


def tries(found: Masters, count: int, hints: Callable[[str], str] = lambda at: "") -> list[str]:
    order = []
    for _ in range(count):
        order.append(found.address)
        found.failed(hints(found.address))
    return order


def test_masters_are_tried_in_turn_with_a_pause_after_each_round() -> None:
    found = Masters(["a", "b", "c"])
    pauses = [found.failed() for _ in range(21)]
    assert [pause > 0 for pause in pauses] == [False, False, True] * 7
    assert pauses[2] == masters.FIRST_PAUSE
    assert max(pauses) == masters.LONGEST_PAUSE
    assert tries(found, 4) == ["a", "b", "c", "a"]
    found.welcomed()
    assert found.failed() + found.failed() == 0
    assert found.failed() == masters.FIRST_PAUSE


def test_a_single_master_has_all_the_time() -> None:
    found = Masters(["a"])
    assert found.patience(5.0) == 5.0
    assert found.failed() == masters.FIRST_PAUSE
    assert tries(found, 2) == ["a", "a"]


def test_a_single_master_that_was_lost_a_moment_ago() -> None:
    found = Masters(["a"])
    assert found.patience(5.0, soon=True) == masters.FIRST_PATIENCE
    assert found.patience(5.0, soon=True, welcome=True) == masters.WELCOME_PATIENCE
    tries(found, 10)
    assert found.patience(5.0, soon=True) == found.patience(5.0, soon=True, welcome=True) == 5.0
    found = Masters(["a", "b"])
    assert found.patience(5.0, soon=True, welcome=True) == masters.FIRST_PATIENCE


def test_one_of_several_has_little_time_at_first() -> None:
    found = Masters(["a", "b"])
    assert found.patience(5.0) == masters.FIRST_PATIENCE
    tries(found, 40)
    assert found.patience(5.0) == 5.0
    found.welcomed()
    assert found.patience(5.0) == masters.FIRST_PATIENCE


def test_a_hint_is_followed_at_once() -> None:
    found = Masters(["a", "b", "c"])
    assert found.failed("c") == 0
    assert found.address == "c"
    found.welcomed()
    found.failed()
    assert found.address == "a", "in turn after the one that was lost"
    assert found.failed("elsewhere") == 0
    assert found.address == "elsewhere"
    found.failed()
    assert found.address == "b"


def test_a_hint_to_the_one_that_was_just_lost_is_not() -> None:
    found = Masters(["a", "b"])
    found.welcomed()
    found.failed()  # a is silent
    assert found.address == "b"
    assert found.failed("a") > 0, "a round is over"
    assert found.address == "a"


def test_masters_that_name_each_other_are_followed_a_few_times() -> None:
    found = Masters(["a", "b", "c", "d"])
    away = {"a": "x", "x": "y", "y": "z", "z": "x", "b": "c", "c": "d", "d": "b"}
    order = tries(found, 40, lambda at: away.get(at, "a"))
    assert {"a", "b", "c", "d"} <= set(order)
    pauses = [found.failed(away.get(found.address, "a")) for _ in range(40)]
    assert sum(pause > 0 for pause in pauses) >= 40 // (4 + masters.HINTS_PER_ROUND) - 1


def test_another_master_that_nothing_elects_is_taken_only_where_the_followed_one_was_met() -> None:
    found = Masters(["a", "b"])
    assert found.refuses("journal 1") == ""
    found.failed()
    assert found.address == "b"
    told = found.refuses("journal 2")
    assert "two masters, and nothing elects one of them: b is of journal 2, a is of journal 1; " in told
    assert found.followed == "journal 1"
    found.failed()
    assert (found.address, found.refuses("journal 3")) == ("a", ""), "the same one, started anew without its journal"
    found.failed()
    assert "a is of journal 3" in found.refuses("journal 2")
    assert (found.refuses("journal 3"), found.met) == ("", {"a": "journal 3", "b": "journal 3"})


@pytest.mark.parametrize("anew", ["journal 1", "journal 2"])
def test_one_master_at_two_addresses_is_followed_at_both_though_it_is_started_anew(anew: str) -> None:
    found = Masters(["a", "b"])
    found.met |= {"a": "journal 1", "b": "journal 1"}  # it was asked
    assert found.refuses("journal 1") == ""
    for _ in range(4):
        found.failed()
        assert found.refuses(anew) == ""


def test_masters_that_differ_are_refused_before_one_is_followed() -> None:
    found = Masters(["a", "b", "c"])
    found.met |= {"a": "etcd 7 under w/", "b": "etcd 8 under w/"}  # c has not answered
    for _ in range(3):
        assert "masters of one" in found.refuses(found.met.get(found.address, "journal 1"))
        found.failed()
    assert found.followed == ""


def test_beside_an_etcd_no_other_master_is_taken_also_where_one_of_its_masters_was_met() -> None:
    """It was started without --etcd at the leader's address: others may still follow the leader that etcd elects."""
    found = Masters(["a", "b"])
    assert found.refuses("etcd 7 under w/") == ""
    for other in ("journal 1", "etcd 8 under w/"):
        found.met["b"] = "etcd 7 under w/"
        told = found.refuses(other)
        assert "a is of " + other in told
        assert ("made anew, start the daemons again" in told) == other.startswith("etcd")
        assert found.refuses("etcd 7 under w/") == ""


def test_a_leader_elsewhere_is_followed_if_the_same_etcd_elects_it() -> None:
    found = Masters(["a"])
    assert found.refuses("etcd 7 under w/") == ""
    found.failed("elsewhere")
    assert found.refuses("etcd 8 under w/") != ""
    assert found.refuses("etcd 7 under w/") == ""


# ---- what is held ---------------------------------------------------------------------------------------

NONSENSE = "names an epoch that has not begun; expected 2 or earlier; got 9"


def test_held_steps_come_out_in_order_when_their_write_is_done() -> None:
    first, second = Ready(messages=[Send(7, m.Ok()), Broadcast((7, 8), m.Ok())]), Ready(closes=[Close(8, "bye")])
    held = Held(4)
    held.add(first, 1)
    held.add(Ready(log=[Record("g", 1, "epoch", "text")]), 1)  # nothing of this waits
    held.add(second, 3)
    assert list(held.release(0)) == []
    assert list(held.release(2)) == [first]
    for _ in range(3):
        held.add(second, 3)
    assert not held.too_many
    held.add(second, 3)
    assert held.too_many
    assert list(held.release(3)) == [second] * 5
    assert not held.too_many
    epoch = m.Epoch("g", 0, 1, 1, [], m.Plan(1, 1, True, {}, [], 0, ""), b"", 1, 0, [], "")
    held.add(Ready(messages=[Announce(((1, 1),) * 5, epoch)]), 4)
    assert held.too_many
    held.clear()
    assert not held.too_many
    assert list(held.release(9)) == []


class Told:
    """A leadership term as the test says."""

    def __init__(
        self, on_end: Callable[[str, int], None] = lambda why, term: None, may_lead: Callable[[], bool] = lambda: True
    ) -> None:
        self.end, self.may_lead = on_end, may_lead


@contextlib.asynccontextmanager
async def server(**limits: Any) -> AsyncIterator[tuple[Server, Connect]]:
    """One that stands by."""
    journal = Journal("")
    found = Server(MasterConfig(limits=replace(PATIENT, **limits), first=True), journal)
    try:
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(found.keep_time)
            nursery.start_soon(found.keep_awake)
            nursery.start_soon(trio.serve_listeners, found.accept, [listener])
            connect = Connect(join_address(*listener.socket.getsockname()[:2]))
            try:
                yield found, connect
            finally:
                for peer in connect.peers:
                    peer.stream.socket.close()
                nursery.cancel_scope.cancel()
    finally:
        journal.close()


async def hears_nothing(peer: Peer) -> None:
    """The server has taken in all that was said, and had no answer."""
    heard: list[Any] = []

    async def hear() -> None:
        heard.append(await peer.hear())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hear)
        await wait_all_tasks_blocked(0.01)
        assert heard == []
        nursery.cancel_scope.cancel()


async def test_nothing_is_sent_before_it_is_written() -> None:
    async with server() as (found, connect):
        store = Later()
        found.lead(store)
        peer = await connect()
        await peer.say(hello("d"), m.Join("g", "me", 2, 1))
        assert (await peer.hear()).term == 5
        await hears_nothing(peer)
        assert store.asked == 1  # mids
        await peer.say(m.Join("g", "you", 2, 1))
        await hears_nothing(peer)
        assert store.asked == 2  # the group's first epoch
        store.written = 1
        found.release()
        assert isinstance(await peer.hear(), m.Joined)
        await hears_nothing(peer)
        await peer.say(m.Heartbeat(0))
        await hears_nothing(peer)  # in order
        await peer.say(m.Heartbeat(3))
        pong = await peer.hear()
        assert pong == m.Pong(3, 5, 3, clock=pong.clock), (
            "a store that is slow is no reason to count the master as lost"
        )
        store.written = 2
        found.release()
        assert [type(await peer.hear()) for _ in range(4)] == [m.Joined, m.Epoch, m.Epoch, m.Pong]


async def test_who_is_put_out_hears_of_it_once_the_epoch_without_it_is_written() -> None:
    async with server() as (found, connect):
        store = Later()
        found.lead(store)
        one, other = await connect(), await connect()
        await one.say(hello("a"), m.Join("g", "one", 2, 1))
        await one.expect(m.Welcome)
        await other.say(hello("b"), m.Join("g", "other", 2, 1))
        await hears_nothing(other)
        store.written = store.asked
        found.release()
        mid = (await other.expect(m.Joined)).mid
        assert (await other.expect(m.Epoch)).epoch == 2
        asked = store.asked
        await other.say(m.Vote("g", mid, 9, 1, 0, 0))  # of an epoch that has not begun
        await hears_nothing(other)
        assert store.asked == asked + 1
        await other.say(m.Heartbeat(1), hello("c"))  # too late
        await hears_nothing(other)
        store.written = store.asked
        found.release()
        assert await other.hear() == m.Evicted("g", mid, "daemon b " + NONSENSE.replace("expected 1", "expected 2"), 0)
        assert await other.hear() == m.Bye("daemon b " + NONSENSE.replace("expected 1", "expected 2"))
        assert await other.hear() is None
        assert found.state is not None
        assert sorted(found.state.daemons) == ["a"]


async def test_who_steps_down_drops_what_it_held_and_says_why() -> None:
    async with server() as (found, connect):
        ends: list[tuple[str, int]] = []
        store = Later()
        found.lead(store, Told(lambda why, term: ends.append((why, term))))
        peer = await connect()
        await peer.say(hello("d"), m.Join("g", "me", 1, 1))
        await peer.expect(m.Welcome)
        await hears_nothing(peer)
        found.step_down("the test says so")
        assert await peer.hear() == m.Bye("this master leads no more: the test says so")
        assert await peer.hear() is None
        store.written = store.asked
        found.release()
        assert ends == [("the test says so", 0)]


@pytest.mark.parametrize("what", ["message", "release", "tick"])
async def test_who_may_not_lead_takes_in_and_sends_nothing(what: str, mock_clock: MockClock) -> None:
    """Its lease ran out while it slept."""
    async with server() as (found, connect):
        store, may = Later(), [True]
        found.lead(store, Told(may_lead=lambda: may[0]))
        peer = await connect()
        await peer.say(hello("d"), m.Join("g", "me", 1, 1))
        await peer.expect(m.Welcome)
        await hears_nothing(peer)
        may[0] = False
        if what == "message":
            await peer.say(m.Heartbeat(1))
        elif what == "release":
            store.written = store.asked
            found.release()
        else:
            for _ in range(2):  # until the daemon was silent for too long; at once, the master would have overslept
                mock_clock.jump(PATIENT.heartbeat_timeout / 2)
                await wait_all_tasks_blocked(0.01)
        assert await peer.hear() == m.Bye("this master leads no more: its lease ran out")
        assert found.state is None


async def test_a_lease_that_runs_out_between_two_daemons_leaves_the_second_untold() -> None:
    """R10. Much may have to be sent to many at once."""
    async with server() as (found, connect):
        may = [True]
        found.lead(Later(), Told(may_lead=lambda: may[0]))
        peers = [await connect(), await connect()]
        for peer, name in zip(peers, "ab", strict=True):
            await peer.say(hello(name))
            await peer.expect(m.Welcome)
        told: list[int] = []

        def runs_out(number: int, flush: Callable[[], None]) -> None:
            flush()
            told.append(number)
            may[0] = False

        for number, stream in found._connections._streams.items():
            stream.flush_batch = partial(runs_out, number, stream.flush_batch)  # type: ignore[method-assign]
            found._connections.put(number, encode(m.Pong(7, 1)))
        found.flush()
        assert len(told) == 1 + len(peers)  # the first one; and then the goodbyes, to both
        assert sorted([await peers[0].hear(), await peers[1].hear()], key=str) == [
            m.Bye("this master leads no more: its lease ran out"),
            m.Pong(7, 1),
        ]


async def test_nothing_is_kept_of_a_daemon_that_was_sent_away_or_of_what_was_held_for_an_earlier_lead() -> None:
    async with server() as (found, connect):
        store = Later()
        found.lead(store, Told())
        peer = await connect()
        await peer.say(hello("d"))
        await peer.expect(m.Welcome)
        assert len(found._connections._kept) == 1
        await peer.say(hello("d"))
        assert "introduces itself twice" in (await peer.expect(m.Bye)).reason
        assert found._connections._kept == {}
        peer = await connect()
        await peer.say(hello("d"), m.Join("g", "me", 1, 1))
        await peer.expect(m.Welcome)
        await hears_nothing(peer)
        assert found._held.frames > 0
        found.step_down("the test says so")
        assert (found._held.frames, found._connections._kept) == (0, {})


async def test_what_a_daemon_has_heard_is_kept_no_longer() -> None:
    """Else too much would be kept at last, and the next break of its connection cost it its place."""
    async with server() as (found, connect):
        found.lead(found._journal)
        peer = await connect()
        await peer.say(hello("d"), m.Join("g", "me", 1, 1))
        await peer.expect(m.Epoch)
        [kept] = found._connections._kept.values()
        heard = len(kept._frames)
        assert heard >= 2
        await peer.say(m.Heartbeat(1, heard=heard))
        await peer.expect(m.Pong)
        assert not kept._frames


async def test_who_does_not_read_is_out_at_once_and_not_only_away() -> None:
    """It may come back anew: what it was to be told is not kept."""
    async with server(send_queue_messages=50) as (found, connect):
        found.lead(found._journal)
        deaf = await connect()
        await deaf.say(hello("deaf"), m.Join("g", "me", 1, 1))
        await deaf.expect(m.Epoch)
        state = found.state
        assert state is not None
        [daemon] = state.daemons.values()
        beats = encode(m.Heartbeat(1)) * 5000
        with trio.fail_after(20), contextlib.suppress(trio.BrokenResourceError):
            while True:
                await deaf.stream.send_all(beats)
        with trio.fail_after(20):
            while not daemon.away and state.daemons:  # noqa: ASYNC110
                await trio.sleep(0.001)
        assert state.daemons == {}


async def test_masters_and_daemons_ask_a_clock_that_goes_on_while_the_machine_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that ask: a lease, a master whether it stood still, a daemon for how long no master has vouched for it."""
    root = Path(clock.__file__).parents[2]
    product = [*root.glob("wancoll/**/*.py"), *root.glob("master/**/*.py")]
    assert [path.name for path in product if "CLOCK_BOOTTIME" in path.read_text()] == ["clock.py"]
    slept, awake = [0.0], clock.awake_or_asleep
    monkeypatch.setattr(clock, "awake_or_asleep", lambda: awake() + slept[0])
    leadership_term = election.Won(
        Lease("lease", 60.0), Leadership(60.0, clock.awake_or_asleep()), Numbers(0, 0, 1, 0), 7, lost_facts=False
    )
    async with server() as (found, connect):
        found.lead(Later(), Told(lambda why, term: None, leadership_term.may_lead))
        peer = await connect()
        await peer.say(hello("d"))
        await peer.expect(m.Welcome)
        assert leadership_term.may_lead()
        with socket.create_server(("127.0.0.1", 0)) as lanes:
            some = lanes, lambda _: None, lambda: None, lambda *_, **__: None, lambda: None, m.Heartbeat
            control = Control(PeerConfig(master="127.0.0.1:9"), "d", 1, [], *some)
            assert control.commit_lease.unheard(clock.awake_or_asleep()) < 60
            slept[0] = 3600.0  # a moment for all other clocks
            assert control.commit_lease.unheard(clock.awake_or_asleep()) > 3600
        assert not leadership_term.may_lead()
        await peer.say(m.Heartbeat(1))
        assert "it stood still for 36" in (await peer.expect(m.Bye)).reason


async def test_a_standby_names_the_leader() -> None:
    async with server() as (found, connect):
        found.stand_by(m.StandsBy("there:1", 7), wait=True)
        for first in (hello("d"), m.StatusRequest(PROTOCOL_VERSION)):
            peer = await connect()
            await peer.say(first)
            assert await peer.hear() == m.StandsBy("there:1", 7)
            assert await peer.hear() is None


async def test_daemons_wait_at_a_standby_while_nobody_leads() -> None:
    async with server() as (found, connect):
        found.stand_by(m.StandsBy("", 0), wait=True)
        first, gone, second, asks = [await connect() for _ in range(4)]
        await first.say(hello("a"))
        await gone.say(hello("b"))
        await asks.say(m.StatusRequest(PROTOCOL_VERSION))
        assert await asks.hear() == m.StandsBy("", 0)
        await hears_nothing(first)
        gone.stream.socket.close()
        found.stand_by(m.StandsBy("there:1", 7), wait=True)
        assert await first.hear() == m.StandsBy("there:1", 7)
        found.stand_by(m.StandsBy("", 0), wait=True)
        await second.say(hello("c"))
        await hears_nothing(second)
        found.lead(Later(9))
        assert (await second.hear()).term == 9
        assert found.state is not None
        assert list(found.state.daemons) == ["c"]


async def test_a_standby_that_knows_nothing_keeps_nobody() -> None:
    async with server() as (found, connect):
        for wait in (True, False):
            found.stand_by(m.StandsBy("", 0), wait=wait)
            peer = await connect()
            await peer.say(hello("d"))
            if wait:
                await hears_nothing(peer)
                found.stand_by(m.StandsBy("", 0), wait=False)
            assert await peer.hear() == m.StandsBy("", 0)
            assert await peer.hear() is None


async def test_a_standby_keeps_only_so_many() -> None:
    async with server(pending_connections=2) as (found, connect):
        found.stand_by(m.StandsBy("", 0), wait=True)
        peers = []
        for i in range(3):
            peers.append(await connect())
            await peers[i].say(hello(f"d{i}"))
            if i < 2:
                await hears_nothing(peers[i])
        assert await peers[2].hear() == m.StandsBy("", 0)
        await peers[0].say(hello("again"))
        assert await peers[0].hear() == m.StandsBy("", 0)
        found.lead(Later(9))
        assert (await peers[1].hear()).term == 9


async def test_an_elected_master_does_not_raise_its_term_itself() -> None:
    async with server() as (found, connect):
        ends: list[int] = []
        found.lead(Later(5), Told(lambda why, term: ends.append(term)))
        peer = await connect()
        await peer.say(told(hello("d"), 8, 99))
        assert "has seen term 8, this master's is 5" in (await peer.hear()).reason
        assert ends == [8]


def told(known: m.Hello, term: int, master: int) -> m.Hello:
    return msgspec.structs.replace(known, term=term, master=master)


# ---- etcd -----------------------------------------------------------------------------------------------

_prefixes = (f"test-{i}/" for i in itertools.count())


@pytest.mark.parametrize("text", ["", "127.0.0.1:2379", "http://", "ftp://a:1", "http://a:1/v3", "http://a:1,,"])
def test_urls_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--etcd cannot be read"):
        check_endpoints(text)


def test_urls() -> None:
    assert check_endpoints("http://a:1/, https://[::1]:2") == ["http://a:1", "https://[::1]:2"]


@pytest.mark.parametrize(
    ("advertise", "bound", "address"),
    [
        ("far.example", "0.0.0.0:7400", "far.example:7400"),
        ("far.example:1", "10.0.0.1:7400", "far.example:1"),
        ("", "10.0.0.1:7400", "10.0.0.1:7400"),
        ("", "0.0.0.0:7400", "127.0.0.1:7400"),
        ("", "[::]:7400", "127.0.0.1:7400"),
    ],
)
def test_what_standbys_name(advertise: str, bound: str, address: str) -> None:
    assert reached_at(advertise, bound, whereabouts("http://127.0.0.1")) == address


def test_without_a_route_a_token_names_the_host_and_the_log_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*_: Any, **__: Any) -> Any:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", no_route)
    with capture_logs() as logs:
        assert reached_at("", "0.0.0.0:7400") == f"{socket.gethostname()}:7400"
    assert ["give --advertise if others" in one["event"] for one in logs] == [True]
    assert reached_at("10.0.0.7", "0.0.0.0:7400") == "10.0.0.7:7400"


def test_the_package_that_is_missing_is_named() -> None:
    """Only --etcd needs it."""
    code = "import sys; sys.modules['httpx'] = None; from wancoll.cli.main import run; run(sys.argv[1:])"
    command = [sys.executable, "-c", code, "master", "--listen=127.0.0.1:0", "--etcd=http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert ".[etcd]" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


async def test_keys_pages_and_transactions(etcd: chaos.Etcd) -> None:
    prefix = next(_prefixes)
    async with Etcd(EtcdConfig(f"http://127.0.0.1:1,{etcd.url}"), 5.0) as client:  # nobody is at the first one
        assert await client.get(f"{prefix}a") is None
        names = [f"{prefix}{i:03} \u00e9/" for i in range(150)]
        for i in range(0, 150, 75):
            assert (await client.txn([], [put(name, f"v{name}") for name in names[i : i + 75]], [])).succeeded
        assert [(one.key, one.value) for one in await client.under(prefix)] == [(name, f"v{name}") for name in names]
        first = await client.get(names[0])
        assert first is not None
        refused = await client.txn([created(names[0], 0)], [put(names[0], "other")], [names[0], f"{prefix}none"])
        assert not refused.succeeded
        assert refused.read == [first, None]
        changed = await client.txn([modified(names[0], first.modified)], [put(names[0], "new")], [])
        assert changed.succeeded
        assert (await client.get(names[0])).modified == changed.revision  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 70])
async def test_a_key_that_is_not_text_is_named(etcd: chaos.Etcd, count: int) -> None:
    """In more than a page of them, too: what comes after the last one is asked for, by its name."""
    prefix = next(_prefixes)
    async with Etcd(EtcdConfig(etcd.url), 5.0) as client:
        for i in range(0, count, 50):
            raw = [f"{prefix}g/".encode() + b"\xff%03d" % k for k in range(i, min(i + 50, count))]
            changes = [put("", "v5 1 1 0 0 1") for _ in raw]
            for change, key in zip(changes, raw, strict=True):
                change["request_put"]["key"] = base64.b64encode(key).decode()
            assert (await client.txn([], changes, [])).succeeded
        with trio.fail_after(10), pytest.raises(EtcdError) as told:
            await client.under(f"{prefix}g/")
        assert f"is not text, so no master wrote it; expected UTF-8; got {raw[0][:-3] + b'000'!r}" in str(told.value)


async def test_more_than_masters_write_is_refused(etcd: chaos.Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = next(_prefixes)
    monkeypatch.setattr(etcd_module, "_MOST_BYTES", 2000)
    async with Etcd(EtcdConfig(etcd.url), 5.0) as client:
        await client.txn([], [put(f"{prefix}{i}", "x" * 400) for i in range(4)], [])
        with pytest.raises(EtcdError, match=f"too much in etcd under {prefix}; expected at most"):
            await client.under(prefix, 2)
        await client.txn([], [delete(f"{prefix}0"), delete(f"{prefix}1")], [])
        assert len(await client.under(prefix, 2)) == 2


async def test_a_lease_ends_with_its_keys(etcd: chaos.Etcd) -> None:
    key = f"{next(_prefixes)}key"
    async with Etcd(EtcdConfig(etcd.url), 5.0) as client:
        lease = await client.grant(60)
        assert lease.ttl == 60
        assert (await client.txn([created(key, 0)], [put(key, "x", lease.id)], [])).succeeded
        assert await client.keep_alive(lease.id) == 60
        await client.revoke(lease.id)
        assert await client.get(key) is None
        assert await client.keep_alive(lease.id) == 0
        with pytest.raises(EtcdError, match="lease not found"):
            await client.txn([], [put(key, "x", lease.id)], [])


@pytest.mark.parametrize(
    "answer", ["[" * 100_000, "7", '{"kvs": [7]}', '{"kvs": 7}', '{"kvs": [{"key": "a", "create_revision": 1e999}]}']
)
async def test_an_answer_that_is_not_etcds(answer: str) -> None:
    async def answers(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n{answer}".encode())

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, answers, 0, host="127.0.0.1"))
        async with Etcd(EtcdConfig(f"http://127.0.0.1:{listener.socket.getsockname()[1]}"), 5.0) as client:
            with pytest.raises(EtcdError, match="not an answer of etcd"):
                await client.get("a")
        nursery.cancel_scope.cancel()


async def test_nobody_answers() -> None:
    async with Etcd(EtcdConfig("http://127.0.0.1:1,http://127.0.0.1:2"), 1.0) as client:
        with pytest.raises(EtcdError, match=r"127\.0\.0\.1:1.*127\.0\.0\.1:2"):
            await client.get("a")


class LosesAnswers(Etcd):
    """Carries out transactions, and does not hear of it now and then."""

    lose = 0

    async def txn(self, *what: Any) -> TxnAnswer:
        answer = await super().txn(*what)
        if self.lose:
            self.lose -= 1
            raise EtcdError("the answer was lost")
        return answer


@contextlib.asynccontextmanager
async def writing(client: Etcd, keys: Keys) -> AsyncIterator[tuple[EtcdStore, Callable[[], Any], list[str]]]:
    """A leader's store; how to wait for its writes; why it was deposed."""
    entry = await client.get(keys.facts)
    answer = await client.txn(
        [created(keys.leader, 0)], [put(keys.leader, "me"), put(keys.facts, text(Numbers(0, 0, 1, 0)))], []
    )
    assert answer.succeeded
    assert entry is None
    store = EtcdStore(client, keys, Numbers(3, 0, 1, 0), answer.revision, 5.0)
    await store.load()
    news, deposed = trio.Event(), list[str]()

    def written() -> None:
        nonlocal news
        news.set()
        news = trio.Event()

    async def write() -> None:
        try:
            await store.write_forever(written)
        except Deposed as why:
            deposed.append(str(why))
            written()

    async def done() -> None:
        with trio.fail_after(30):
            while store.written < store.asked and not deposed:
                await news.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        yield store, done, deposed
        nursery.cancel_scope.cancel()


async def loaded(client: Etcd, keys: Keys) -> Facts:
    """What the next leader reads."""
    entry = await client.get(keys.facts)
    assert entry is not None
    store = EtcdStore(client, keys, read(entry, Numbers), 0, 5.0)
    await store.load()
    return store.facts


async def test_what_another_version_wrote_is_refused(etcd: chaos.Etcd) -> None:
    keys = Keys(next(_prefixes))
    async with Etcd(EtcdConfig(etcd.url), 5.0) as client, writing(client, keys):
        await client.txn([], [put(keys.groups + "g", "4 40 1 300\n{}")], [])
        with pytest.raises(Unreadable, match="g in etcd: cannot be read by this version; expected a group of form v5"):
            await loaded(client, keys)


HUGE, DEEP = str(1 << 62), "[" * 200_000  # a number that nothing can be counted on from
BAD = ["1e999", "1.5", "-1", HUGE, "9" * 5000, "true", "null", '"1"', DEEP, '{"a":' * 200_000, "NaN"]


@pytest.mark.parametrize(
    "value",
    [
        "", "\ufffd", "7", "{}", DEEP, '{"term": 1, "epoch": 1, "mid": 0, "write": 1}',
        *(f'{{"term": {bad}, "epoch": 1, "mid": 1, "write": 1}}' for bad in BAD),
        *(f'{{"address": "h:1", "term": {bad}, "id": "x"}}' for bad in BAD),
        *(f'{{"address": {bad}, "term": 1, "id": "x"}}' for bad in [*BAD, '""', '"\\ud800:1"', f'"{"h" * 300}:1"']),
        f'{{"address": "h:1", "term": 1, "id": "x", "more": {DEEP}}}',
        f'{{"term": 1, "epoch": 1, "mid": 1, "write": 1, "more": {DEEP}}}',
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Leader, Numbers])
def test_what_no_master_wrote_is_named_and_believed_by_none(kind: type[Leader | Numbers], value: str) -> None:
    with pytest.raises(Unreadable) as told:
        read(Entry("w/key", value, 1, 1), kind)
    assert f"w/key in etcd: cannot be read by this version; expected JSON of {kind.__name__}; got " in str(told.value)
    assert "`etcdctl del w/key`" in str(told.value)
    assert len(str(told.value)) < 1000


def test_what_a_master_wrote_comes_back() -> None:
    for value in (Leader("[::1]:7400", 1 << 61, "x"), Numbers(1 << 61, 2, 3, 4), Numbers(0, 0, 1, 0)):
        assert read(Entry("key", text(value), 1, 1), type(value)) == value


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("bad", ["1e999", "-1", HUGE, "9" * 5000, "x", DEEP, '"\ud800"'], ids=lambda bad: bad[:10])
def test_what_no_master_wrote_of_a_group_is_refused(at: int, bad: str) -> None:
    good = ["4", "40", "300", "99", "7", '{"ProtocolError":[41]}', '{"7":["m",9]}']

    def used(*numbers: str) -> Used:
        return used_from(numbers[:5], *numbers[5:])

    assert used(*good) == Used(4, frozenset({7}), 40, {41: "ProtocolError"}, 300, {7: Former("m", 9)}, 99)
    into = {5: f'{{"ProtocolError":[{bad}]}}', 6: f'{{"{bad}":["m",9]}}'}
    with pytest.raises(ValueError, match=r".+"):
        used(*good[:at], into.get(at, bad), *good[at + 1 :])


def test_a_group_is_of_no_more_than_can_be_told() -> None:
    for numbers, voids, former in [
        ([1, 1, 1], "", ""),
        ([1, 1, 1, 1, *range(1025)], "", ""),
        ([1, 1, 1, 1], json.dumps({"E": list(range(8193))}), ""),
        ([1, 1, 1, 1], DEEP, ""),
        ([1, 1, 1, 1], "", json.dumps(dict.fromkeys(range(1025), ("m", 1)))),
    ]:
        with pytest.raises(ValueError, match=r".+"):
            used_from(numbers, voids, former)


async def test_what_the_next_leader_knows(etcd: chaos.Etcd) -> None:
    keys = Keys(next(_prefixes))
    async with LosesAnswers(EtcdConfig(etcd.url), 5.0) as client, writing(client, keys) as (store, done, deposed):
        store.persist(Persist(0, 1025))
        await done()
        client.lose = 2
        store.persist(Persist(4, 7, groups={"a b": Used(4, frozenset({1, 300}), 40, {41: "ProtocolError"})}))
        await done()
        for i in range(200):  # more than one transaction takes
            store.persist(Persist(5 + i, 7, groups={f"g{i}": Used(5 + i, frozenset({i}), 40)}))
        store.persist(Persist(205, 7, groups={"g0": Used(205, frozenset({1}), 40)}))
        assert store.written < store.asked
        await done()
        assert deposed == []
        facts = await loaded(client, keys)
        assert (facts.term, facts.highest_epoch, facts.next_mid) == (3, 205, 1025)
        assert list(facts.used)[:2] == ["a b", "g1"]
        assert list(facts.used)[-1] == "g0"
        assert facts.used["a b"] == Used(4, frozenset({1, 300}), 40, {41: "ProtocolError"})
        assert len(facts.used) == 201


async def test_a_deposed_leader_writes_nothing(etcd: chaos.Etcd) -> None:
    keys = Keys(next(_prefixes))
    async with Etcd(EtcdConfig(etcd.url), 5.0) as client, writing(client, keys) as (store, done, deposed):
        store.persist(Persist(1, 2, groups={"g": Used(1, frozenset({1}), 40)}))
        await done()
        await client.txn([], [delete(keys.leader)], [])
        await client.txn([created(keys.leader, 0)], [put(keys.leader, "another one")], [])
        store.persist(Persist(2, 2, groups={"g": Used(2, frozenset({1, 2}), 40)}))
        await done()
        assert "another master leads" in deposed[0]
        facts = await loaded(client, keys)
        assert (facts.highest_epoch, facts.used) == (1, {"g": Used(1, frozenset({1}), 40)})


async def test_a_write_that_comes_late_changes_nothing(etcd: chaos.Etcd) -> None:
    """One that was given up lay with an endpoint, and is carried out when later ones are."""
    keys = Keys(next(_prefixes))

    class Delays(Etcd):
        late: list[Any] = []

        async def txn(self, *what: Any) -> TxnAnswer:
            if not self.late:
                self.late.append(what)
                raise EtcdError("no answer")
            return await super().txn(*what)

    async with Delays(EtcdConfig(etcd.url), 5.0) as client:
        client.late.append(None)  # not the first transactions
        async with writing(client, keys) as (store, done, deposed):
            client.late.clear()
            store.persist(Persist(1, 2, groups={"g": Used(1, frozenset({1}), 40)}))
            await done()
            store.persist(Persist(2, 2, groups={"g": Used(2, frozenset({1, 2}), 40)}))
            await done()
            assert not (await Etcd.txn(client, *client.late[0])).succeeded
            assert (await loaded(client, keys)).used == {"g": Used(2, frozenset({1, 2}), 40)}
            assert deposed == []


async def test_groups_with_the_oldest_epochs_are_forgotten(etcd: chaos.Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "GROUPS_KEPT", 5)
    keys = Keys(next(_prefixes))
    async with Etcd(EtcdConfig(etcd.url), 5.0) as client, writing(client, keys) as (store, done, _):
        for i in range(100):
            store.persist(Persist(i, 1, groups={f"g{i}": Used(100 - i, frozenset({i}), 40)}))
        await done()
        await store.load()
        assert list(store.facts.used) == ["g4", "g3", "g2", "g1", "g0"]
        assert len(await client.under(keys.groups)) == 5


async def test_etcd_that_takes_no_writes_ends_the_leadership(etcd: chaos.Etcd) -> None:
    class Full(Etcd):
        full = False

        async def txn(self, *what: Any) -> TxnAnswer:
            if self.full:
                raise EtcdError("database space exceeded")
            return await super().txn(*what)

    async with (
        Full(EtcdConfig(etcd.url), 5.0) as client,
        writing(client, Keys(next(_prefixes))) as (store, done, deposed),
    ):
        store._write_timeout = 0.2
        client.full = True
        store.persist(Persist(1, 2))
        await done()
        assert deposed == ["etcd did not take a write within 0.2 s: database space exceeded"]


# ---- elections ------------------------------------------------------------------------------------------


async def test_what_is_asked_for_during_a_write_counts_with_the_next_one() -> None:
    """What rests on it is told no earlier."""
    goes_on, begun, written = trio.Event(), 0, list[int]()

    class Slow:
        cluster = "c"

        async def txn(self, *_: Any) -> TxnAnswer:
            nonlocal begun
            begun += 1
            if begun > 1:
                await trio.sleep_forever()
            await goes_on.wait()
            return TxnAnswer(True, 8, [])

    etcd: Any = Slow()
    store = EtcdStore(etcd, Keys("p/"), Numbers(0, 0, 1, 0), 7, 60.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.write_forever, lambda: written.append(store.written))
        store.persist(Persist(1, 1, 1, {"g": Used(1, frozenset({1}), 0)}))
        await wait_all_tasks_blocked()
        store.persist(Persist(2, 1, 1, {"h": Used(2, frozenset({2}), 0)}))
        goes_on.set()
        await wait_all_tasks_blocked()
        assert (begun, store.asked, written) == (2, 2, [1])
        nursery.cancel_scope.cancel()


async def test_a_renewal_counts_from_when_it_was_sent_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10. The keeper may have granted it at once, and its answer have been on its way for long."""
    now = [100.0]
    monkeypatch.setattr(clock, "awake_or_asleep", lambda: now[0])

    class Slow:
        asked = 0

        async def keep_alive(self, lease: str) -> float:
            assert lease == "lease"
            self.asked += 1
            if self.asked == 2:
                await trio.sleep_forever()
            now[0] += 0.4
            return 3.0

        async def get(self, key: str) -> Entry:
            now[0] += 0.4
            return Entry(key, "", 7, 7)

    etcd: Any = Slow()
    nobody: Any = None
    leads = Leadership(3.0, 0.0)
    won = election.Won(Lease("lease", 3.0), leads, Numbers(0, 0, 1, 0), 7, lost_facts=False)
    async with trio.open_nursery() as nursery:
        elected = election.Election(EtcdConfig("http://h:1"), nobody, "h:2")
        nursery.start_soon(elected._renew, etcd, won)
        while etcd.asked < 2:  # noqa: ASYNC110
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert leads.until == 100.0 + 3.0 * (1 - SAFETY)


async def test_a_lease_is_given_back_though_the_machine_stands_still(autojump_clock: MockClock) -> None:
    """For four seconds, by a clock that the test moves."""

    class Slow(Etcd):
        def __init__(self) -> None:
            self.revoked = ""

        async def revoke(self, lease: str) -> None:
            await trio.sleep(4)
            self.revoked = lease

    etcd = Slow()
    await give_back(etcd, Lease("7", 10.0))
    assert etcd.revoked == "7"


class Rivals:
    """Masters with one prefix in etcd."""

    def __init__(self, nursery: trio.Nursery, url: str) -> None:
        self._nursery, self._config = nursery, EtcdConfig(url, next(_prefixes), TTL)
        self.prefix = self._config.prefix
        self.addresses: list[str] = []
        self._scopes: list[trio.CancelScope] = []
        self._ended: list[trio.Event] = []

    async def start(self) -> str:
        config = MasterConfig(listen="127.0.0.1:0", etcd=self._config, first=True)
        scope, ended = trio.CancelScope(), trio.Event()

        async def run(task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
            with scope:
                await serve(config, task_status=task_status)
            ended.set()

        [address] = await self._nursery.start(run)
        self.addresses.append(address)
        self._scopes.append(scope)
        self._ended.append(ended)
        return str(address)

    async def stop(self, address: str) -> None:
        k = self.addresses.index(address)
        self._scopes[k].cancel()
        await self._ended[k].wait()
        del self.addresses[k], self._scopes[k], self._ended[k]

    async def ask(self, *addresses: str) -> tuple[m.Status, list[status.Role]]:
        """As `wancoll status` does, once one leads and is known to."""
        with trio.fail_after(30):
            while True:
                with contextlib.suppress(MasterUnreachable):
                    return await trio.to_thread.run_sync(
                        status.find, list(addresses or self.addresses), Asking(timeout=5.0)
                    )
                await trio.sleep(0.01)


@contextlib.asynccontextmanager
async def rivals(url: str) -> AsyncIterator[Rivals]:
    with quick_elections():
        async with trio.open_nursery() as nursery:
            yield Rivals(nursery, url)
            nursery.cancel_scope.cancel()


async def elected_by(address: str) -> str:
    peer = await Connect(address)()
    await peer.say(m.AskElection(PROTOCOL_VERSION))
    answer = await peer.hear()
    peer.stream.socket.close()
    assert isinstance(answer, m.Welcome | m.StandsBy)
    return answer.elected_by


async def test_a_master_that_nothing_elects_is_known_by_its_journal(tmp_path: Path) -> None:
    told = []
    for journal in (str(tmp_path / "one"), str(tmp_path / "one"), str(tmp_path / "two"), "none", "none"):
        async with master(journal="" if journal == "none" else journal) as connect:
            told.append(await elected_by(join_address(connect.host, connect.port)))
            peer = await connect()
            await peer.say(hello("d"))
            assert (await peer.expect(m.Welcome)).elected_by == told[-1]
    assert told[0] == told[1]
    assert len(set(told)) == 4
    assert all(one.startswith("journal ") for one in told)


async def test_one_leads_and_who_is_stopped_hands_over_at_once(etcd: chaos.Etcd, capsys: Any) -> None:
    async with rivals(etcd.url) as found, Etcd(EtcdConfig(etcd.url), 5.0) as client:
        terms = []
        for _ in range(3):
            while len(found.addresses) < 2:
                await found.start()
            answer, roles = await found.ask()
            terms.append(answer.term)
            assert sorted(role.state for role in roles) == [f"leads, term {answer.term}", "stands by"]
            await client.get("what its id is")
            elect = {await elected_by(address) for address in found.addresses}
            assert elect == {f"etcd {client.cluster} under {found.prefix}"}
            leader = next(role.address for role in roles if role.state.startswith("leads"))
            other = next(address for address in found.addresses if address != leader)
            alone, _ = await found.ask(other)
            assert alone.term == answer.term, "a standby names the leader"
            await found.stop(leader)
            entry = await client.get(Keys(found.prefix).leader)
            assert entry is None or read(entry, Leader).address == other, "the lease was given back"
            await found.ask()
        assert terms == [1, 2, 3]
        status.print_tables(answer, roles)
        assert (
            f"masters: {roles[0].address} {roles[0].state}; {roles[1].address} {roles[1].state}"
            in capsys.readouterr().out
        )


async def test_a_higher_term_than_etcd_knows(etcd: chaos.Etcd) -> None:
    """etcd's data was lost: the next term is above what daemons have seen, and groups do not form anew at once."""
    async with rivals(etcd.url) as found:
        connect = Connect(await found.start())
        await found.ask()
        peer = await connect()
        await peer.say(told(hello("d"), 40, 99))
        assert "has seen term 40" in (await peer.expect(m.Bye)).reason
        assert (await found.ask())[0].term == 41 + JUMP
        peer = await connect()
        await peer.say(told(hello("d"), 40, 99), m.Join("g", "me", 1, 1))
        assert (await peer.expect(m.Welcome)).term == 41 + JUMP
        assert "members of an earlier one" in (await peer.expect(m.Joined)).reason
        for each in connect.peers:
            each.stream.socket.close()


@pytest.mark.check
@pytest.mark.parametrize("gone", ["leader", ""], ids=["the leader's key", "all keys"])
async def test_who_leads_while_its_key_is_deleted_steps_down_before_another_leads(
    etcd: chaos.Etcd, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """The lease lives: the key is gone for another reason."""
    led: list[tuple[Server, bool, int]] = []
    seen = trio.Event()
    lead, step_down, stand_by = Server.lead, Server.step_down, Server.stand_by

    def stands_by(self: Server, answer: m.StandsBy, *, wait: bool) -> None:
        if answer.leader:
            seen.set()
        stand_by(self, answer, wait=wait)

    def leads(self: Server, store: Any, *what: Any, **more: Any) -> None:
        led.append((self, True, store.facts.term))
        lead(self, store, *what, **more)

    def stops(self: Server, reason: str, heard: int = 0) -> None:
        if self.state is not None:
            led.append((self, False, self.state.term))
        step_down(self, reason, heard)

    monkeypatch.setattr(Server, "lead", leads)
    monkeypatch.setattr(Server, "step_down", stops)
    monkeypatch.setattr(Server, "stand_by", stands_by)
    async with rivals(etcd.url) as found, Etcd(EtcdConfig(etcd.url), 5.0) as client:
        for _ in range(2):
            await found.start()
        with trio.fail_after(30):
            await seen.wait()
            for entry in await client.under(f"{found.prefix}{gone}"):
                await client.txn([], [delete(entry.key)], [])
            while len(led) < 3:  # noqa: ASYNC110
                await trio.sleep(0.01)
        (first, *_), *others = led
        following = 2 if gone else 2 + JUMP  # with the facts all numbers are lost but that term
        assert [(what, term) for _, what, term in led] == [(True, 1), (False, 1), (True, following)]
        assert others[0][0] is first


async def test_a_standby_waits_for_a_lease_that_lives_and_where_all_is_lost_for_as_long(
    etcd: chaos.Etcd, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that the test moves, and an etcd that says what the test wants."""
    said: dict[str, Any] = {}

    class Says(Etcd):
        async def get(self, key: str) -> Entry | None:
            return said.get(key)

        async def lives(self, lease: str) -> bool:
            return lease in said

        async def grant(self, ttl: int) -> Lease:
            return Lease("1", ttl)

        async def txn(self, *what: Any) -> TxnAnswer:
            return TxnAnswer(True, 9, [])

    now = [100.0]
    monkeypatch.setattr(clock, "awake_or_asleep", lambda: now[0])
    config, keys = EtcdConfig(etcd.url, "w/", TTL), Keys("w/")
    async with server() as (found, _), Says(EtcdConfig(etcd.url), 5.0) as client:
        one = election.Election(config, found, "me:1")
        numbers = Entry(keys.facts, text(Numbers(7, 8, 9, 10)), 1, 4)
        said |= {keys.leader: Entry(keys.leader, text(Leader("it:1", 7, "x")), 3, 3, "77"), keys.facts: numbers}
        assert not await one._look(client)
        said |= {keys.leader: None, "77": True}
        assert not await one._look(client), "its lease lives"
        del said["77"]
        assert await one._look(client)
        won = await one._campaign(client)
        assert won is not None
        assert (won.numbers.term, won.lost_facts) == (8, False)
        said[keys.facts] = None
        now[0] += TTL - 0.1
        assert await one._campaign(client) is None, "etcd has lost all, and its leader may not know"
        now[0] += 0.1
        won = await one._campaign(client)
        assert won is not None
        found_then = won.numbers
        assert (found_then, won.lost_facts) == (Numbers(7 + JUMP + 1, 7 + JUMP, 1025 + JUMP, 1), True)
        one._heard = found_then.term  # it has led, and all is lost again
        won = await one._campaign(client)
        assert won is not None
        assert won.lost_facts
        assert won.numbers.epoch >= found_then.epoch + JUMP, "no number that can have been given"
        assert won.numbers.mid >= found_then.mid + JUMP
        assert won.numbers.mid % 1024 == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("leader", '{"address":"127.0.0.1:1","term":1e999,"id":"x"}'),
        ("facts", DEEP),
        pytest.param("groups/g", f"v5 {1 << 70} 1 1 0 1", marks=pytest.mark.check),
    ],
)
async def test_a_master_stands_by_until_what_nobody_can_read_is_gone(
    etcd: chaos.Etcd, capfd: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    async with rivals(etcd.url) as found, Etcd(EtcdConfig(etcd.url), 5.0) as client:
        spoilt = f"{found.prefix}{key}"
        await client.txn([], [put(spoilt, value)], [])
        address, said = await found.start(), ""
        with trio.fail_after(30):
            while f"{spoilt} in etcd: cannot be read by this version" not in said:
                await trio.sleep(0.01)
                said += "".join(capfd.readouterr())
        with pytest.raises(MasterUnreachable, match="no master leads"):
            await trio.to_thread.run_sync(status.find, [address], ASKED)
        await client.txn([], [delete(spoilt)], [])
        assert (await found.ask())[0].term >= 1


async def test_masters_say_why_nobody_leads_where_etcd_is_full() -> None:
    def ask(etcd: chaos.Etcd, path: str, **what: Any) -> Any:
        request = urllib.request.Request(f"{etcd.url}/v3/maintenance/{path}", json.dumps(what).encode())
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    with chaos.Etcd() as full:
        member = ask(full, "status")["header"]["member_id"]
        alarm = {"memberID": member, "alarm": "NOSPACE"}
        ask(full, "alarm", action="ACTIVATE", **alarm)
        async with rivals(full.url) as found:
            address, said = await found.start(), ""
            with trio.fail_after(30):
                while "database space exceeded" not in said:
                    with pytest.raises(MasterUnreachable) as failed:
                        await trio.to_thread.run_sync(status.find, [address, "127.0.0.1:1"], Asking(timeout=1.0))
                    said = str(failed.value)
            assert f"got {address}: stands by: {full.url}: 429 " in said
            ask(full, "alarm", action="DEACTIVATE", **alarm)
            assert (await found.ask())[0].term == 1


async def test_no_master_leads() -> None:
    async with server() as (found, connect):
        found.stand_by(m.StandsBy("", 0), wait=True)
        address = join_address(connect.host, connect.port)
        with pytest.raises(MasterUnreachable, match=f"{address}: stands by"):
            await trio.to_thread.run_sync(status.find, [address, "127.0.0.1:1"], Asking(timeout=1.0))

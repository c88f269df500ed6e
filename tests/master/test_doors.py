"""The master's port against one that means harm: its connection ends, the others' groups go on, nothing is poisoned."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.master.test_master import PATIENT, Peer, hello, join_and_commit, master, member, status
from tests.master.transcript import report_of
from wancoll.limits import PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll.wire.framing import encode
from wancoll_master import server, statuses
from wancoll_master.core import membership

MOST_OF_64_BITS = (1 << 64) - 1
SIGNED = (1 << 63) - 1
TAUGHT = 1 << 40  # the most that is believed


def report(**fields: Any) -> m.Report:
    """Of a member of the daemon "evil"."""
    mid = fields.get("mid", 1)
    plain = {"group": "h", "members": [(mid, "me", "evil")], "plan": m.Plan(1, 1, True, {}, [], 0, "")}
    fields = plain | {"start_world": 1} | fields
    return report_of(fields.pop("mid", 1), **fields)


POISON: dict[str, list[Any]] = {
    **{f"join was={n}": [hello("evil"), m.Join("h", "me", 1, 1, n)] for n in (MOST_OF_64_BITS, SIGNED, SIGNED - 1030)},
    **{f"report mid={n}": [hello("evil"), report(mid=n)] for n in (MOST_OF_64_BITS, SIGNED, m.MOST, TAUGHT)},
    **{
        f"report epoch={n}": [hello("evil"), report(epoch=n, aborted=True), m.Heartbeat(0)]
        for n in (MOST_OF_64_BITS, SIGNED, m.MOST, TAUGHT)
    },
    **{
        f"report committed={n}": [hello("evil"), report(committed_upto=n), m.Heartbeat(0)]
        for n in (MOST_OF_64_BITS, m.MOST, TAUGHT)
    },
    "report heard": [hello("evil"), report(heard=TAUGHT, aborted=True), m.Heartbeat(0)],
    "report an algorithm": [
        hello("evil"),
        report(plan=m.Plan(1, 1, True, {"all_reduce": [(0, "magic")]}, [], 0, ""), aborted=True),
        m.Heartbeat(0),
    ],
    "report choices without end": [
        hello("evil"),
        report(plan=m.Plan(1, 1, True, {"all_reduce": [(9, "ring")]}, [], 0, ""), aborted=True),
        m.Heartbeat(0),
    ],
    **{
        f"hello term={n}": [msgspec.structs.replace(hello("evil"), term=n, master=7)]
        for n in (MOST_OF_64_BITS, SIGNED, TAUGHT)
    },
}


@pytest.mark.parametrize("case", POISON)
async def test_poison_ends_its_own_connection_at_most(case: str, tmp_path: Any, mock_clock: MockClock) -> None:
    """Others reduce before, meanwhile and after it, and with a master that is started from the same journal."""
    path = str(tmp_path / "journal")
    async with master(replace(PATIENT, rejoin_grace=1.0), journal=path) as connect:
        peers = [await member(connect, f"m{i}", 2) for i in range(2)]
        epochs = [await peer.expect(m.Epoch) for peer, _ in peers]
        evil = await connect()
        with contextlib.suppress(trio.BrokenResourceError):
            await evil.say(*POISON[case])
        await wait_all_tasks_blocked(0.01)  # it has been read
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked(0.01)  # what it reported is decided by then
        for peer, mid in peers:
            await peer.say(m.Vote("g", mid, epochs[0].epoch, 1, 7, 9))
        for peer, _ in peers:
            assert (await peer.expect(m.Commit)).upto == 1
        await join_and_commit(connect, "k")
    for group in ("l", "n"):
        async with master(journal=path) as connect:
            await join_and_commit(connect, group)


async def test_a_stranger_cannot_report_away_a_group_that_is_forming() -> None:
    """It waits for its start_world; a Report of an epoch that nobody knows of does not put the joiners out."""
    async with master() as connect:
        first, _ = await member(connect, "m0", 2)
        evil = await connect()
        await evil.say(hello("evil"), report(group="g", start_world=1, aborted=True), m.Heartbeat(0))
        fate = await evil.expect(m.Evicted)
        assert fate.unknown_upto == m.MOST
        second, _ = await member(connect, "m1", 2)
        for peer in (first, second):
            assert {one.name for one in (await peer.expect(m.Epoch)).members} == {"m0", "m1"}


async def test_a_bug_in_a_step_costs_no_group_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the master had died before it told anybody: the guilty one is sent away, the others report and go on."""
    step, falls = membership.step, m.Join("g", "x" * 128, 1, 1)

    def fails(state: Any, now: float, event: Any, planner: Any) -> Any:
        ready = step(state, now, event, planner)
        if getattr(event, "message", None) == falls:
            raise KeyError("planted")
        return ready

    monkeypatch.setattr(membership, "step", fails)
    async with master() as connect:
        peer, mid = await member(connect, "m0", 1)
        epoch = await peer.expect(m.Epoch)
        before = (await status(connect)).term
        evil = await connect()
        await evil.say(hello("evil"), falls)
        assert "made the master fail" in (await evil.expect(m.Bye)).reason
        assert "KeyError" in (await peer.expect(m.Bye)).reason
        peer = await connect()
        await peer.say(msgspec.structs.replace(hello("m0"), term=before, master=1))
        assert (await peer.expect(m.Welcome)).term == before + 1
        who = [(one.mid, one.name, one.daemon) for one in epoch.members]
        head = ("g", mid, epoch.epoch, who, epoch.plan, epoch.key, 1, epoch.min_world, epoch.reason)
        finished = m.EpochReport(0, [(1, 7, 9)], [], [])
        await peer.say(m.Report(*head, 0, [], False, finished, [], 0, [], []), m.Heartbeat(0))
        assert (await peer.expect(m.Resumed)).epoch == epoch.epoch
        assert (await peer.expect(m.Commit)).upto == 1


async def pings(peer: Peer, seconds: float) -> float:
    """The longest that a heartbeat's answer took, in seconds that this process, the master's too, had a processor."""
    until, longest, number = trio.current_time() + seconds, 0.0, 1
    while trio.current_time() < until:
        asked = time.process_time()
        await peer.say(m.Heartbeat(number))
        while (await peer.expect(m.Pong)).number != number:
            pass
        longest, number = max(longest, time.process_time() - asked), number + 1
        await trio.sleep(0.01)
    return longest


@pytest.mark.parametrize(
    "flood", [encode(m.StatusRequest(PROTOCOL_VERSION)), encode(m.Heartbeat(1)), encode(m.Leave("g", "x"))]
)
@pytest.mark.parametrize("reads", [True, False])
async def test_a_flood_of_small_messages_holds_up_nobody(flood: bytes, reads: bool) -> None:
    """Nor makes it the master think that it stood still; one that does not read the answers is cut off."""
    async with master(replace(PATIENT, heartbeat_timeout=5.0)) as connect:
        crowd = await connect()
        await crowd.say(hello("crowd"), *(m.Join("g" * 100, f"m{i}", 200, 1) for i in range(150)))
        evil, good = await connect(), await connect()
        await evil.say(hello("evil"))
        await good.say(hello("good"))
        await good.expect(m.Welcome)
        before = (await status(connect)).term

        async def flooding() -> None:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while True:
                    await evil.stream.send_all(flood * (65536 // len(flood)))

        async def reading() -> None:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while await evil.stream.receive_some():
                    pass

        async def beating(peer: Peer) -> None:
            while True:
                await peer.say(m.Heartbeat(1))
                await trio.sleep(0.3)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flooding)
            nursery.start_soon(beating, crowd)
            if reads:
                nursery.start_soon(reading)
            longest = await pings(good, 1.0)
            nursery.cancel_scope.cancel()
        assert longest < 1.0
        assert (await status(connect)).term == before


async def test_others_have_their_turn_within_what_one_connection_said_at_once(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """However long one read of it takes: a flood's 64 KiB are less than what a test could time on a busy machine."""
    step, order = membership.step, list[str]()
    async with master() as connect:
        evil, good = await connect(), await connect()
        await evil.say(hello("evil"))
        await good.say(hello("good"))
        await good.expect(m.Welcome)

        def slow(state: Any, now: float, event: Any, planner: Any) -> Any:
            said = getattr(event, "message", None)
            if isinstance(said, m.Leave):
                mock_clock.jump(server._TURN / 2)
                if not order:  # while its messages are taken in
                    os.write(good.stream.socket.fileno(), encode(m.Leave("good", "x")))
                order.append(said.group)
            return step(state, now, event, planner)

        monkeypatch.setattr(membership, "step", slow)
        await evil.say(*(m.Leave("evil", "x") for _ in range(100)), m.Heartbeat(1))
        await evil.expect(m.Pong)
        await good.say(m.Heartbeat(1))
        await good.expect(m.Pong)
    assert len(order) == 101
    assert order.index("good") < 20


async def test_status_takes_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock) -> None:
    whole, made = statuses.Statuses._status, 0

    def slow(*asked: Any) -> m.Status:
        nonlocal made
        made += 1
        mock_clock.jump(0.5)
        return whole(*asked)

    monkeypatch.setattr(statuses.Statuses, "_status", slow)
    async with master() as connect:
        began = trio.current_time()
        for _ in range(60):
            await status(connect)
            mock_clock.jump(0.5)
        took = trio.current_time() - began
    assert 5 <= made <= (statuses._BURST + 0.5 + took / 10) / 0.5 < 12


async def test_a_daemon_that_says_the_same_over_and_over_does_not_fill_log_and_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(server, "_LINES_AT_ONCE", 20)
    monkeypatch.setattr(statuses, "STATUS_EVENTS", 1000)
    async with master(journal=str(tmp_path / "journal")) as connect:
        loud, began = await connect(), time.monotonic()
        with structlog.testing.capture_logs() as lines:
            await loud.say(hello("loud"), *(m.Join("g", f"m{number}", 1, 1024) for number in range(300)))
            for _ in range(300):
                await loud.expect(m.Refused)
            most = 20 + 10 * (time.monotonic() - began)
            await trio.sleep(0.15)
            await loud.say(m.Join("g", "m", 1, 1024))
            await loud.expect(m.Refused)
        refused = [line for line in lines if line["event"] == "refused"]
        assert 20 <= len(refused) - 1 <= most < 300
        assert sum(line.get("left_out", 0) for line in refused) == 301 - len(refused)
        kept = [event.kind for event in (await status(connect)).events]
        assert kept.count("refused") == len(refused)
        assert "daemon" in kept


async def test_one_daemon_too_many_is_told_which_limit_it_met() -> None:
    async with master(replace(PATIENT, daemons=2)) as connect:
        for name in ("a", "b", "a"):
            peer = await connect()
            await peer.say(hello(name))
            await peer.expect(m.Welcome)
        late = await connect()
        await late.say(hello("c"))
        assert "at most 2" in (await late.expect(m.Bye)).reason
        assert len((await status(connect)).daemons) == 2  # which is for anybody


@pytest.mark.parametrize("source", ["127.0.0.1", "192.0.2.7"])
async def test_in_clear_faults_are_armed_from_this_machine_alone(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(server, "whose", lambda _: source)
    async with master(failpoint_token="t") as connect:
        for token, right in (("t", True), ("u", False)):
            peer = await connect()
            await peer.say(m.Arm(token, "before_commit", "clear"))
            answer = await peer.hear()
            if source == "127.0.0.1":
                assert (answer == m.Ok()) == right
            else:
                assert "expected a token of role chaos, or loopback" in answer.reason

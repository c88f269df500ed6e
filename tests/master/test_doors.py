"""The master's port against one that means harm: its connection ends, the others' groups go on, nothing is poisoned."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import trio

from tests.master.test_master import QUICK, Connect, Peer, hello, join_and_commit, master, member, status
from tests.master.transcript import report_of
from wancoll.limits import PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll.wire.framing import encode
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
async def test_poison_ends_its_own_connection_at_most(case: str, tmp_path: Any) -> None:
    """Others reduce before, meanwhile and after it, and with a master that is started from the same journal."""
    path = str(tmp_path / "journal")
    async with master(replace(QUICK, heartbeat_timeout=30), journal=path) as connect:
        peers = [await member(connect, f"m{i}", 2) for i in range(2)]
        epochs = [await peer.expect(m.Epoch) for peer, _ in peers]
        evil = await connect()
        with contextlib.suppress(trio.BrokenResourceError):
            await evil.say(*POISON[case])
        await trio.sleep(0.2)  # rejoin_grace: what it reported is decided by then
        for peer, mid in peers:
            await peer.say(m.Done("g", mid, epochs[0].epoch, 1, 7, 9))
        for peer, _ in peers:
            assert (await peer.expect(m.Commit)).upto == 1
        await join_and_commit(connect, "k")
    for group in ("l", "n"):
        async with master(QUICK, journal=path) as connect:
            await join_and_commit(connect, group)


async def test_a_stranger_cannot_report_away_a_group_that_is_forming() -> None:
    """It waits for its start_world; a Report of an epoch that nobody knows of does not put the joiners out."""
    async with master(replace(QUICK, heartbeat_timeout=30)) as connect:
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
    async with master(replace(QUICK, rejoin_grace=2.0)) as connect:
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
        await peer.say(m.Report(*head, 0, 0, [], False, [(1, 7, 9)], [], [], 0, [], []), m.Heartbeat(0))
        assert (await peer.expect(m.Resumed)).epoch == epoch.epoch
        assert (await peer.expect(m.Commit)).upto == 1


async def pings(peer: Peer, seconds: float) -> float:
    """The longest that a heartbeat's answer took."""
    until, longest, number = trio.current_time() + seconds, 0.0, 1
    while trio.current_time() < until:
        asked = trio.current_time()
        await peer.say(m.Heartbeat(number))
        while (await peer.expect(m.Pong)).number != number:
            pass
        longest, number = max(longest, trio.current_time() - asked), number + 1
        await trio.sleep(0.01)
    return longest


@pytest.mark.parametrize(
    "flood", [encode(m.StatusRequest(PROTOCOL_VERSION)), encode(m.Heartbeat(1)), encode(m.Leave("g", "x"))]
)
@pytest.mark.parametrize("reads", [True, False])
async def test_a_flood_of_small_messages_holds_up_nobody(flood: bytes, reads: bool) -> None:
    """Nor makes it the master think that it stood still; one that does not read the answers is cut off."""
    async with master(QUICK) as connect:
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


async def test_one_daemon_too_many_is_told_which_limit_it_met() -> None:
    async with master(replace(QUICK, daemons=2, heartbeat_timeout=30)) as connect:
        for name in ("a", "b", "a"):
            peer = await connect()
            await peer.say(hello(name))
            await peer.expect(m.Welcome)
        late = await connect()
        await late.say(hello("c"))
        assert "at most 2" in (await late.expect(m.Bye)).reason
        await status_within(connect)


async def status_within(connect: Connect) -> None:
    """With the daemons that are there: status is for anybody."""
    began = time.monotonic()
    assert len((await status(connect)).daemons) == 2
    assert time.monotonic() - began < 2.0

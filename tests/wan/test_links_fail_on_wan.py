"""Links that fail while their members live: noticed in time, named exactly, and the sum is that of its contributors."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.support import (
    MIB,
    Background,
    Outcome,
    attempt,
    check_agreed,
    close_all,
    contribution,
    join,
    new_group,
    reduce_all,
    total,
    untouched,
    wait_until,
)
from tests.wan.network import Wan
from wancoll.chaos import Cluster
from wancoll.errors import Evicted, MasterUnreachable, OutcomeUnknown, PeerDaemonLost, WorldTooSmall
from wancoll.wire import messages as m

pytestmark = [pytest.mark.wan, pytest.mark.timeout(120)]

PEERS = 4
# Timeouts, seconds. Status is looked at before a member that stands still is evicted, also where the machine is busy.
LANE, LINK, DIAL, HEARTBEAT, SLOW = 2.0, 2.0, 1.5, 20.0, 0.7
NOTICED = LANE + 0.5  # a look at the lanes every 0.25 s, and the way to the master
AROUND = NOTICED + LINK + DIAL  # until the master knows that the pair cannot be dialled; then it routes around
PUT_OUT = AROUND + 5.0 / 2  # and half the master's link_timeout before it puts a member out
BUSY = 15.0  # seconds more that all may take where the machine has other things to do


class Net:
    """Four peers a few milliseconds apart, and their network."""

    def __init__(self, wan: Wan, cluster: Cluster) -> None:
        self.wan, self.cluster = wan, cluster

    def cut(self, sender: Any, receiver: Any) -> None:
        """Packets from one host to the other vanish."""
        self.wan.change_path(sender, receiver, loss=1.0)

    def cut_both(self, i: Any, j: Any) -> None:
        """In both directions."""
        self.cut(i, j)
        self.cut(j, i)

    def vanish(self, i: int) -> None:
        """The host is gone, without a word to anybody."""
        for host in [*range(PEERS), "master"]:
            if host != i:
                self.cut_both(i, host)

    def heal(self) -> None:
        """All of it."""
        hosts = [*range(PEERS), "master"]
        for i, j in itertools.permutations(hosts, 2):
            if self.wan.path(i, j).loss:
                self.wan.change_path(i, j, loss=0.0)

    def group(self, name: str) -> m.GroupStatus:
        """As `wancoll status` has it."""
        return next(found for found in self.cluster.status().groups if found.name == name)


@contextmanager
def make_net(*, heartbeat: float = HEARTBEAT, delay: float = 0.002) -> Iterator[Net]:
    options = [f"--lane-timeout={LANE}", f"--link-timeout={LINK}", f"--connect-timeout={DIAL}", f"--slow-after={SLOW}"]
    with (
        Wan(PEERS, delay=delay, rate=500e6) as wan,
        Cluster(
            PEERS,
            lanes=4,
            network=wan,
            heartbeat_timeout=heartbeat,
            master_args=[f"--slow-after={SLOW}"],
            peer_args=options,
        ) as cluster,
    ):
        yield Net(wan, cluster)


@pytest.fixture(scope="module")
def shared() -> Iterator[Net]:
    with make_net() as net:
        yield net


@pytest.fixture
def net(shared: Net) -> Iterator[Net]:
    yield shared
    shared.heal()
    for i in range(PEERS):
        if not shared.cluster.running(i):
            shared.cluster.restart_peer(i)
        shared.cluster.resume(i)


class Running:
    """A group in which every member sums, while the test breaks something."""

    def __init__(self, net: Net, count: int, late: Mapping[int, Callable[[], object]] = {}, min_world: int = 1) -> None:
        self.net, self.name = net, new_group()
        self.comms = join(net.cluster, range(PEERS), group=self.name, min_world=min_world)
        self.order = [int(name.removeprefix("m")) for name in self.comms[0].members]  # around the ring
        reduce_all(self.comms, range(PEERS))
        self.tensors = [contribution(k, count) for k in range(PEERS)]
        self.late = late
        self.ops: Background | None = None

    def start(self) -> None:
        """All call."""

        def call(k: int) -> Outcome:
            if k in self.late:
                self.late[k]()
            return attempt(lambda: self.comms[k].all_reduce(self.tensors[k], op="sum"))

        self.ops = Background(call, PEERS)

    def end(self, within: float, out: Sequence[int] = ()) -> list[Outcome]:
        """All calls end in time; members not in *out* agree on the sum of their contributions."""
        assert self.ops is not None
        outcomes: list[Outcome] = self.ops.results(within + BUSY)
        stay = [k for k in range(PEERS) if k not in out]
        if stay:
            agreed = check_agreed([outcomes[k] for k in stay], [self.tensors[k] for k in stay])
            assert sorted(agreed) == [f"m{k}" for k in stay]
        for k in out:
            assert outcomes[k].error is not None
            assert untouched(self.tensors[k], k)
        took = max(outcome.ended for outcome in outcomes) - self.ops.started
        print(f"ended after {took:.2f} s, attempts {[one.receipt.attempts if one.receipt else 0 for one in outcomes]}")
        return outcomes

    def waits_for(self, wanted: set[tuple[str, str]], within: float = 10.0) -> m.WaitStatus:
        """Status comes to name exactly these members (name, "") or links (from, to)."""
        started = time.monotonic()
        seen: list[tuple[float, list[m.WaitStatus]]] = []  # each look that differs from the one before

        def named() -> bool:
            waits = self.net.group(self.name).waits[:1]
            causes = [{(cause.member, cause.other) for cause in one.causes} for one in waits]
            if not seen or causes != [{(cause.member, cause.other) for cause in one.causes} for one in seen[-1][1]]:
                seen.append((time.monotonic() - started, waits))
            return causes == [wanted]

        try:
            wait_until(named, within + BUSY, f"status names {wanted}")
        except AssertionError:
            raise AssertionError(f"status named, from these seconds on: {seen}") from None
        print(f"named after {time.monotonic() - started:.2f} s")
        return seen[-1][1][0]

    def pairs(self) -> dict[tuple[str, str], m.PairStatus]:
        """What status says of failed links."""
        return {(one.source, one.target): one for one in self.net.group(self.name).pairs}

    def close(self) -> None:
        self.net.heal()
        close_all(self.comms)


@contextmanager
def running(
    net: Net, count: int = 1000, late: Mapping[int, Callable[[], object]] = {}, min_world: int = 1
) -> Iterator[Running]:
    run = Running(net, count, late, min_world)
    try:
        yield run
    except BaseException:
        print(net.cluster.master_logs(60), *(net.cluster.logs(i, 40) for i in range(PEERS)), sep="\n\n")
        raise
    finally:
        run.close()


def name(k: int) -> str:
    return f"m{k}"


# ---- status names whom an operation waits for --------------------------------------------------------


def late_caller(socket: str, group: str, me: int, go: str) -> Iterator[object]:
    """A member that takes part in two sums, in the second one once the file *go* is there."""
    import wancoll

    with wancoll.connect(socket=socket, group=group, name=f"m{me}", start_world=PEERS, min_world=1) as comm:
        comm.all_reduce(contribution(me, 1000), op="sum")
        yield "one"
        while not os.path.exists(go):
            time.sleep(0.01)
        x = contribution(me, 1000)
        receipt = comm.all_reduce(x, op="sum")
        yield receipt.attempts, float(x[0])


@pytest.mark.check
def test_status_names_a_member_that_has_not_called(net: Net, tmp_path: Path) -> None:
    group, go = new_group(), tmp_path / "go"
    client = net.cluster.client(3, late_caller, group, 3, str(go))
    options = {"group": group, "start_world": PEERS, "min_world": 1}
    joining = Background(lambda i: net.cluster.connect(i, name=name(i), **options), 3)
    comms = joining.results()
    first = Background(lambda i: attempt(lambda: comms[i].all_reduce(contribution(i, 1000), op="sum")), 3)
    assert client.next() == "one"
    first.results()
    tensors = [contribution(i, 1000) for i in range(3)]
    second = Background(lambda i: attempt(lambda: comms[i].all_reduce(tensors[i], op="sum")), 3)

    def named() -> bool:
        waits = net.group(group).waits
        return bool(waits) and [(one.member, one.other) for one in waits[0].causes] == [("m3", "")]

    wait_until(named, 10 + BUSY, "status names m3")
    status = net.group(group)
    wait = status.waits[0]
    assert (wait.op, wait.seq, wait.epoch, wait.nbytes) == (f"{group}/2", 2, status.epoch, 4000)
    assert wait.what == "all_reduce(1000 x float32, op=sum)"
    assert wait.causes[0].why == "it has not called the operation"
    assert wait.causes[0].rank == comms[0].members.index("m3")
    since = time.monotonic() - second.started
    assert SLOW <= wait.seconds <= since + 0.1
    assert SLOW <= wait.causes[0].seconds <= since + 0.1
    assert "operation 2" in status.waiting_for
    assert "m3 (rank " in status.waiting_for

    def local() -> Any:
        members = net.cluster.peer_status(0)["members"]
        return next(one for one in members if one["group"] == group)["waits"]

    wait_until(lambda: "m3 (rank" in local()["master_says"], 10, "the daemon knows it, too")
    assert local()["operations"][0]["seq"] == 2
    wait_until(lambda: "operation 2" in net.cluster.master_logs(200), 10, "the master's log says so")
    go.touch()
    assert client.next() == (1, total(["m0", "m1", "m2", "m3"]))
    for outcome in second.results():
        assert outcome.receipt is not None
        assert outcome.receipt.attempts == 1
    wait_until(lambda: not net.group(group).waits, 10, "nothing waits any more")
    close_all(comms)
    client.close()


def test_a_timeout_says_whom_the_call_waits_for(net: Net) -> None:
    called = threading.Event()
    with running(net, late={2: called.wait}) as run:
        run.start()
        run.waits_for({("m2", "")})
        other = contribution(0, 10)
        work = run.comms[0].all_reduce(other, op="sum", async_op=True)

        def told() -> bool:
            with pytest.raises(TimeoutError) as caught:
                work.wait(timeout=0.2)
            return re.search(r"m2 \(rank \d\): it has not called the operation", str(caught.value)) is not None

        wait_until(told, 5 + BUSY, "the call says whom it waits for")
        called.set()
        run.end(1.0)
        rest = Background(lambda k: run.comms[k].all_reduce(contribution(k, 10), op="sum"), range(1, PEERS))
        assert work.wait(10).world_size == PEERS
        rest.results()


def test_status_names_a_stopped_daemon(net: Net) -> None:
    with running(net) as run:
        culprit = run.order[1]
        net.cluster.pause(culprit)
        run.start()
        wait = run.waits_for({(name(culprit), "")}, 5.0)
        assert wait.causes[0].why == f"its daemon peer-{culprit} has said nothing"
        net.cluster.resume(culprit)
        for outcome in run.end(1.0):
            assert outcome.receipt is not None
            assert outcome.receipt.attempts == 1


@pytest.mark.parametrize("count", [1000, pytest.param(MIB, marks=pytest.mark.nightly)])
def test_status_names_the_direction_of_a_cut(net: Net, count: int) -> None:
    """And one that heals before lane_timeout costs nothing but the time."""
    with running(net, count) as run:
        one, other = run.order[1], run.order[2]
        net.cut(one, other)
        run.start()
        wait = run.waits_for({(name(one), name(other))}, LANE)
        assert (wait.causes[0].rank, wait.causes[0].other_rank) == (1, 2)
        net.heal()
        run.end(1.0)


@pytest.mark.nightly
def test_status_names_a_cut_in_both_directions(net: Net) -> None:
    with running(net, MIB) as run:
        one, other = run.order[0], run.order[1]
        net.cut_both(one, other)
        run.start()
        wait = run.waits_for({(name(one), name(other))}, LANE)  # the ring's data go in one direction
        assert wait.done < PEERS
        net.heal()
        run.end(1.0)


# ---- links fail --------------------------------------------------------------------------------------


def around(run: Running, *pairs: tuple[int, int]) -> None:
    """The group went on with all members, on other ways, and status says who could not reach whom."""
    run.end(AROUND)
    told = run.pairs()
    done = []
    for one, other in pairs:
        found = [told[ends] for ends in ((name(one), name(other)), (name(other), name(one))) if ends in told]
        assert found, told
        done.append({one.done for one in found})
    # The way around one pair may happen to avoid the other one, too, before its link could be found unreachable.
    assert any("routed around" in each for each in done), told
    assert all(each & {"routed around", "dialled again"} for each in done), told
    members = run.comms[0].members
    neighbours = {frozenset((members[k], members[k - 1])) for k in range(len(members))}
    for one, other in pairs:
        assert frozenset((name(one), name(other))) not in neighbours


@pytest.mark.parametrize("count", [1000, pytest.param(4 * MIB, marks=pytest.mark.nightly)])
def test_a_one_way_cut_is_routed_around(net: Net, count: int) -> None:
    with running(net, count) as run:
        one, other = run.order[0], run.order[1]
        if count == 1000:
            net.cut(one, other)
        run.start()
        if count > 1000:
            time.sleep(0.05)  # in mid-op
            net.cut(one, other)
        around(run, (one, other))
        reasons = [event.text for event in net.cluster.status().events if event.group == run.name]
        assert any("cannot reach" in text and name(one) in text and name(other) in text for text in reasons)


@pytest.mark.nightly
def test_both_ends_of_a_cut_see_it(net: Net) -> None:
    with running(net, 4 * MIB) as run:
        one, other = run.order[0], run.order[1]
        run.start()
        time.sleep(0.05)  # in mid-op
        net.cut_both(one, other)
        around(run, (one, other))
        both = {(name(one), name(other)), (name(other), name(one))}
        wait_until(lambda: both <= set(run.pairs()), DIAL + BUSY, "both have complained")


@pytest.mark.nightly
def test_two_cuts_at_once_are_routed_around(net: Net) -> None:
    with running(net, 4 * MIB) as run:
        a, b, c, d = run.order
        run.start()
        time.sleep(0.05)  # in mid-op
        net.cut_both(a, b)
        net.cut(c, d)
        around(run, (a, b), (c, d))


@pytest.mark.nightly
def test_a_member_with_one_link_left_is_put_out(net: Net) -> None:
    with running(net) as run:
        a, b, c, _ = run.order
        net.cut_both(b, a)
        net.cut_both(b, c)
        run.start()
        outcomes = run.end(PUT_OUT + LINK + DIAL, out=[b])
        error = outcomes[b].error
        assert isinstance(error, Evicted)
        assert "cannot reach" in str(error)
        told = run.pairs()
        done = {one.done for ends, one in told.items() if name(b) in ends}
        assert f"evicted {name(b)}" in done, told


@pytest.mark.nightly
def test_a_world_that_is_too_small_says_who_could_not_reach_whom(net: Net) -> None:
    with running(net, min_world=PEERS) as run:
        a, b, c, _ = run.order
        net.cut_both(b, a)
        net.cut_both(b, c)
        run.start()
        outcomes = run.end(PUT_OUT + LINK + DIAL, out=range(PEERS))
        for k in range(PEERS):
            error = outcomes[k].error
            assert isinstance(error, Evicted if k == b else WorldTooSmall), repr(error)
            assert "cannot reach" in str(error)
            assert name(b) in str(error)


@pytest.mark.parametrize("held", [pytest.param(1.0, marks=pytest.mark.nightly), LANE + 1.0])
def test_a_cut_that_heals_costs_nobody(net: Net, held: float) -> None:
    """Shorter than lane_timeout: nothing happens. Longer: the link is dialled again by whoever's turn it is."""
    with running(net, 4 * MIB) as run:
        one, other = run.order[0], run.order[1]
        run.start()
        time.sleep(0.05)  # in mid-op
        net.cut(one, other)
        time.sleep(held)
        net.heal()
        outcomes = run.end(held + LINK + DIAL)
        if held < LANE:
            assert all(one.receipt is not None and one.receipt.attempts == 1 for one in outcomes)


@pytest.mark.nightly
def test_a_cut_while_another_member_dies(net: Net) -> None:
    """Three are left, and no ring of three avoids a pair: one of it is evicted, the other two have their sum."""
    with running(net, 4 * MIB) as run:
        one, other, dies = run.order[0], run.order[1], run.order[2]
        run.start()
        time.sleep(0.05)  # in mid-op
        net.cut_both(one, other)
        time.sleep(1.0)
        net.cluster.kill(dies)
        assert run.ops is not None
        outcomes = run.ops.results(2 * PUT_OUT + BUSY)
        there = [k for k in range(PEERS) if outcomes[k].error is None]
        agreed = check_agreed([outcomes[k] for k in there], [run.tensors[k] for k in there])
        assert sorted(agreed) == [name(k) for k in there]
        assert isinstance(outcomes[dies].error, OutcomeUnknown)
        gone = {one, other} - set(there)
        assert (len(there), len(gone)) == (2, 1), there
        assert isinstance(outcomes[gone.pop()].error, Evicted)
        print(f"ended after {max(outcome.ended for outcome in outcomes) - run.ops.started:.2f} s")


@pytest.mark.nightly
def test_a_host_that_vanishes(net: Net) -> None:
    """Its connections stay half open. The survivors go on after the heartbeat; it learns its fate when it is back."""
    with running(net, MIB) as run:
        gone = run.order[1]
        run.start()
        time.sleep(0.02)  # in mid-op
        net.vanish(gone)
        stay = [k for k in range(PEERS) if k != gone]
        assert run.ops is not None
        wait_until(lambda: all(run.ops.finished[k] for k in stay), HEARTBEAT + 2 + BUSY, "the survivors have a result")
        net.heal()
        outcomes = run.ops.results(15)
        print(f"survivors' commit after {max(outcomes[k].ended for k in stay) - run.ops.started:.2f} s")
        error = outcomes[gone].error
        if error is None:  # the operation had ended before
            assert sorted(check_agreed(outcomes, run.tensors)) == [name(k) for k in range(PEERS)]
            return
        assert sorted(check_agreed([outcomes[k] for k in stay], [run.tensors[k] for k in stay])) == list(
            map(name, stay)
        )
        assert isinstance(error, Evicted | OutcomeUnknown | MasterUnreachable), repr(error)
        assert untouched(run.tensors[gone], gone)


@pytest.mark.nightly
def test_a_host_that_reboots_at_once(net: Net) -> None:
    """Nobody gets a reset from it until it is back; then the others' half-open connections get theirs."""
    with running(net, 4 * MIB) as run:
        gone = run.order[2]
        run.start()
        time.sleep(0.05)  # in mid-op
        net.vanish(gone)
        net.cluster.kill(gone)
        net.heal()
        net.cluster.restart_peer(gone)
        outcomes = run.end(HEARTBEAT + 2, out=[gone])
        assert isinstance(outcomes[gone].error, OutcomeUnknown | PeerDaemonLost)  # its call may not have been sent yet
        stay = [k for k in range(PEERS) if k != gone]
        reduce_all([run.comms[k] for k in stay], stay)


# ---- zero windows with a good reason -----------------------------------------------------------------


@pytest.mark.check
def test_a_member_that_calls_late_costs_no_epoch() -> None:
    """Its neighbours' sockets are full for longer than lane_timeout, since it has not called yet: that is no fault.

    Far apart, what waited is on the way for a look or two before any of it is acknowledged: that is none, either.
    """
    with (
        make_net(delay=0.1) as net,
        running(net, 4 * MIB, late={1: lambda: time.sleep(2 * LANE + 1.0)}) as run,
    ):
        epoch = run.comms[0].epoch
        run.start()
        run.waits_for({("m1", "")})
        outcomes = run.end(2 * LANE + 2)
        assert all(one.receipt is not None and one.receipt.attempts == 1 for one in outcomes)
        assert {comm.epoch for comm in run.comms} == {epoch}
        assert not run.pairs()
        assert np.array_equal(run.tensors[0], run.tensors[3])

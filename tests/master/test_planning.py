"""Plans from measured links, as transcripts: daemons report, the master asks, waits, decides, and changes its mind."""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.master.transcript import GROUP, Room
from wancoll.limits import KIB, PROTOCOL_VERSION
from wancoll.schedule.cost import AVAILABLE, chosen
from wancoll.wire import messages as m
from wancoll_master.core.liveness.link_faults import BAD_PAIR_SECONDS
from wancoll_master.core.paths.measuring import BURST_WAIT, SMALL, WAIT
from wancoll_master.core.ready import Received
from wancoll_master.core.views import report
from wancoll_master.plan import planning
from wancoll_master.plan.planning import FAR_STRIPE, LOOK_SECONDS, Request, propose
from wancoll_master.plan.topology import LOCAL_STRIPE, SHARED_STRIPE, STRIPE

MB = 1e6


class Net(Room):
    """Daemons that measure, *rtt* seconds and *speed* bytes per second apart unless paths say otherwise."""

    def __init__(self, rtt: float = 0.08, speed: float = 50 * MB) -> None:
        super().__init__()
        self.rtt, self.speed = rtt, speed
        self.rtts: dict[frozenset[str], float] = {}
        self.speeds: dict[tuple[str, str], float] = {}

    def arrive(
        self,
        *daemons: str,
        max_lanes: int = 32,
        controls: tuple[str, ...] = ("bbr",),
        site: str = "",
        cores: int = 4,
        host: str = "",
    ) -> None:
        for daemon in daemons:
            conn, self._next_conn = self._next_conn, self._next_conn + 1
            self.conns[daemon] = conn
            where = [f"{host or daemon}:7000"]
            hello = m.Hello(
                PROTOCOL_VERSION, daemon, 1, where, 8, site, "0.1.0", max_lanes, list(controls), True, cores=cores
            )
            self.step(Received(conn, hello))

    def measure(self, times: int = 10) -> int:
        """Every daemon answers what it was asked; returns how many questions there were."""
        count = 0
        for _ in range(times):
            for daemon in list(self.conns):
                for ask in self.take(daemon, m.MeasureLink):
                    count += 1
                    self.answer(daemon, ask)
        return count

    def answer(self, daemon: str, ask: m.MeasureLink) -> None:
        rtt = self.rtts.get(frozenset({daemon, ask.daemon}), self.rtt)
        self.tell(daemon, m.LinkMeasure(ask.daemon, rtt, 0, 0, 0))
        if ask.nbytes:
            speed = self.speeds.get((daemon, ask.daemon), self.speed)
            self.tell(daemon, m.LinkMeasure(ask.daemon, 0, speed, 0, 0))

    def tell(self, daemon: str, *links: m.LinkMeasure, uplink: float = 0.0, lanes: int = 0) -> None:
        self.say(daemon, m.LinkReport(list(links), uplink, lanes))

    def start(self, count: int, **hello) -> m.Epoch:
        """Members m0, m1, ... of daemons d0, d1, ..., measured; returns the first epoch."""
        self.arrive(*(f"d{i}" for i in range(count)), **hello)
        for i in range(count):
            self.join(f"m{i}", start=count)
        self.measure()
        return self.new_epoch()

    def uplinks(self, speed: float, lanes: int) -> None:
        for daemon in list(self.conns):
            self.tell(daemon, uplink=speed, lanes=lanes)

    def pass_update(self) -> m.Epoch | None:
        """All members call update_membership; returns the new epoch if there is one. Nothing may be lost by it."""
        seq = self.group.committed + 1
        self.sleep(LOOK_SECONDS)
        self.all_update(seq)
        assert self.group.committed == seq
        assert not self.group.current.tally.open
        told = self.epochs()
        assert not told or (told[0].committed_upto, told[0].voids) == (seq, [])
        return told[0] if told else None

    def said(self, kind: str) -> list[str]:
        return [record.text for record in self.records if record.kind == kind]


@pytest.fixture
def net(monkeypatch) -> Net:
    monkeypatch.setattr(planning, "LANE_LOOKS", 1)  # one test says what it is for
    return Net()


# ---- asking and waiting -----------------------------------------------------------------------------


def test_a_group_starts_once_round_trips_and_then_uplinks_are_known(net):
    net.arrive("d0", "d1", "d2")
    for i in range(3):
        net.join(f"m{i}", start=3)
    asks = {daemon: net.take(daemon, m.MeasureLink) for daemon in net.conns}
    assert [(daemon, ask.daemon, ask.nbytes) for daemon, told in asks.items() for ask in told] == [
        ("d1", "d0", 0),
        ("d2", "d1", 0),
        ("d2", "d0", 0),
    ]
    net.no_epoch()
    for daemon, told in asks.items():
        for ask in told:
            net.answer(daemon, ask)
    bursts = {daemon: net.take(daemon, m.MeasureLink) for daemon in net.conns}
    assert [(daemon, ask.daemon) for daemon, told in bursts.items() for ask in told] == [
        ("d0", "d1"),
        ("d1", "d2"),
        ("d2", "d0"),
    ]
    assert all(ask.nbytes > 0 for told in bursts.values() for ask in told)
    for daemon, told in bursts.items():
        assert net.epoch == 0
        net.answer(daemon, told[0])
    assert net.epoch == 1
    # The other paths are measured while the group runs.
    others = [(daemon, ask.daemon) for daemon in net.conns for ask in net.take(daemon, m.MeasureLink)]
    assert sorted(others) == [("d0", "d2"), ("d1", "d0"), ("d2", "d1")]


def test_daemons_that_do_not_answer_hold_a_group_up_for_a_bounded_time(net):
    net.arrive("d0", "d1")
    net.join("m0", start=2)
    net.join("m1", start=2)
    net.sleep(WAIT - 0.01)
    net.no_epoch()
    net.sleep(0.02)
    assert net.new_epoch().plan.choices == {}  # nothing is known


def test_a_burst_that_fails_holds_nobody_up_and_one_that_hangs_not_for_long(net):
    net.arrive("d0", "d1")
    net.join("m0", start=2)
    net.join("m1", start=2)
    net.tell("d1", m.LinkMeasure("d0", 0.08, 0, 0, 0))
    net.tell("d0", m.LinkMeasure("d1", 0, 0, 0, 0))  # failed
    net.sleep(BURST_WAIT - 0.01)
    net.no_epoch()
    net.sleep(0.02)
    plan = net.new_epoch().plan
    assert (plan.pacing, plan.stripe, plan.spares) == (0, FAR_STRIPE, True)


def test_near_members_do_not_wait_for_bursts():
    net = Net(rtt=0.0004)
    net.arrive("d0", "d1")
    net.join("m0", start=2)
    net.join("m1", start=2)
    net.tell("d1", m.LinkMeasure("d0", 0.0004, 0, 0, 0))
    plan = net.new_epoch().plan
    assert (plan.stripe, plan.pacing, plan.congestion, plan.turns, plan.spares) == (STRIPE, 0, "", True, False)


def test_cubic_over_short_paths_and_bbr_over_long_ones():
    for rtt, best in ((0.0005, "cubic"), (0.08, "bbr")):
        assert Net(rtt=rtt).start(3, controls=("reno", "bbr", "cubic")).plan.congestion == best
        assert Net(rtt=rtt).start(3, controls=("reno",)).plan.congestion == ""


def test_a_lost_daemon_is_not_waited_for(net):
    net.arrive("d0", "d1", "d2")
    net.join("m0", start=2)
    net.join("m1", start=2)
    net.take("d1", m.MeasureLink)
    net.drop("d1")
    net.join("m2", start=2)
    net.measure()
    assert net.names == ["m0", "m2"]
    assert all("d1" not in ends for ends in net.state.asked)


def test_one_machine_and_daemons_that_do_not_measure_are_not_asked():
    room = Room()
    for i in range(2):
        room.hello(f"d{i}", addresses=(f"127.0.0.1:{i + 1}",), cores=2)
        room.join(f"m{i}", start=2)
    assert (room.epoch, room.group.planned.plan.stripe, room.take("d0", m.MeasureLink)) == (1, LOCAL_STRIPE, [])
    room = Room()
    room.form(2)
    assert room.state.asked == {}


def test_large_worlds_are_asked_for_few_paths(net):
    count = 40
    net.arrive(*(f"d{i}" for i in range(count)))
    for i in range(count):
        net.join(f"m{i}", start=count)
    asked = net.measure()
    assert net.epoch == 1
    most = (count - 1).bit_length()
    assert asked <= count * 3 * most
    sources = [source for (source, _), path in net.state.measures.paths.items() if path.probed]
    assert max(map(sources.count, set(sources))) <= most
    assert count > SMALL


def test_a_joiner_is_measured_before_it_is_admitted(net):
    net.start(2)
    net.arrive("d9")
    net.join("m9", start=2)
    asks = net.take("d9", m.MeasureLink)
    assert {ask.daemon for ask in asks} == {"d0", "d1"}
    net.admit("m9")
    net.all_update(1)
    net.no_epoch()
    for ask in asks:
        net.answer("d9", ask)
    assert len(net.new_epoch().members) == 3
    assert net.state.measures.rtt("d9", "d0") == 0.08


# ---- plans ------------------------------------------------------------------------------------------


def test_the_plan_of_members_that_are_far_apart(net):
    plan = net.start(4).plan
    assert (plan.lanes, plan.stripe, plan.turns, plan.congestion) == (8, 8 * KIB, True, "bbr")
    assert plan.lane_groups == 1  # all lanes share what is to be sent
    assert plan.pacing == 50 * MB // 8
    assert set(plan.choices) == set(AVAILABLE)
    assert chosen(plan.choices["all_reduce"], 1000) == "full_exchange"
    assert chosen(plan.choices["all_reduce"], 4 * 1000 * KIB) == "direct"
    assert chosen(plan.choices["all_reduce"], 1 << 30) == "ring"


def test_a_group_that_was_on_one_machine_gets_the_lanes_of_long_paths_when_it_grows(net):
    net.arrive("d0", "d1")
    net.join("m0", start=1)
    assert net.new_epoch().plan.lanes < 8
    net.join("m1", start=1)
    net.measure()
    net.admit("m1")
    net.update("m0", 1)
    assert net.new_epoch().plan.lanes == 8


def test_the_slowest_edge_sets_the_pace(net):
    net.speeds = {("d0", "d1"): 90 * MB, ("d1", "d2"): 20 * MB, ("d2", "d0"): 70 * MB}
    net.arrive("d0", "d1")
    net.arrive("d2", controls=("cubic",))
    for i in range(3):
        net.join(f"m{i}", start=3)
    net.measure(2)
    plan = net.new_epoch().plan
    assert (plan.congestion, plan.pacing) == ("", 20 * MB // 8)


def uneven(net: Net, *speeds: float) -> m.Epoch:
    """Start with uplinks of these speeds."""
    count = len(speeds)
    net.speeds = {(f"d{i}", f"d{j}"): speeds[i] for i in range(count) for j in range(count) if i != j}
    return net.start(count)


def by_name(epoch: m.Epoch) -> dict[str, int]:
    return dict(zip((member.name for member in epoch.members), epoch.plan.shares, strict=True))


def test_members_with_slow_uplinks_own_less_of_a_tensor_where_that_is_faster(net):
    epoch = uneven(net, 11 * MB, 11 * MB, 11 * MB, 4 * MB)
    assert by_name(epoch) == {"m0": 1024, "m1": 1024, "m2": 1024, "m3": 0}
    assert chosen(epoch.plan.choices["all_reduce"], 64 << 20) == "direct"  # with even uplinks: the ring
    assert net.group.planned.cost.owning == 0.67
    assert uneven(Net(), 11 * MB, 14 * MB, 9 * MB, 12 * MB).plan.shares == []  # as noise has it
    assert uneven(Net(), 11 * MB, 4 * MB).plan.shares == []


def test_shares_wait_for_all_uplinks_and_go_where_their_members_go(net):
    net.arrive("d0", "d1", "d2", "d3")
    for i in range(4):
        net.join(f"m{i}", start=4)
    for i in range(4):
        for j in range(4):
            if i != j:
                net.tell(f"d{i}", m.LinkMeasure(f"d{j}", 0.08, 11 * MB if i else 0, 0, 0))
    net.sleep(BURST_WAIT + 0.01)
    assert net.new_epoch().plan.shares == []
    for i in (1, 2, 3):
        net.tell("d0", m.LinkMeasure(f"d{i}", 0, 4 * MB, 0, 0))
    epoch = net.pass_update()
    assert epoch is not None
    assert by_name(epoch) == {"m0": 0, "m1": 1024, "m2": 1024, "m3": 1024}
    assert "all_reduce" in epoch.reason
    net.drop("d2")
    net.sleep(net.limits.heartbeat_timeout)
    assert by_name(net.new_epoch()) == {"m0": 0, "m1": 1024, "m3": 1024}


def test_other_shares_are_a_better_plan():
    """The algorithm stays: d3's uplink is slow at first, and then it is d0's."""
    net = Net()
    assert by_name(uneven(net, 11 * MB, 11 * MB, 11 * MB, 4 * MB))["m3"] == 0
    assert net.pass_update() is None
    for i in range(4):
        for j in range(4):
            if i != j:
                net.tell(f"d{i}", m.LinkMeasure(f"d{j}", 0, (11 if i else 4) * MB, 0, 0))
    epoch = net.pass_update()
    assert epoch is not None
    assert by_name(epoch) == {"m0": 0, "m1": 1024, "m2": 1024, "m3": 1024}
    assert "direct -> direct, other shares" in epoch.reason


def test_a_slow_downlink_counts_where_its_senders_send_faster_elsewhere(net):
    into = {"d0": 4 * MB, "d1": 11 * MB, "d2": 11 * MB, "d3": 11 * MB}
    net.speeds = {(f"d{i}", to): speed for i in range(4) for to, speed in into.items()}
    first = net.start(4)
    assert by_name(net.pass_update() or first) == {"m0": 0, "m1": 1024, "m2": 1024, "m3": 1024}


def test_sites_make_the_hierarchical_algorithm_a_candidate():
    net = Net(rtt=0.1, speed=12 * MB)
    for i in range(4):
        net.arrive(f"d{i}", site="east" if i % 2 else "west")
        for j in range(i):
            if (i - j) % 2 == 0:
                net.rtts[frozenset({f"d{i}", f"d{j}"})] = 0.0002
                net.speeds[f"d{i}", f"d{j}"] = net.speeds[f"d{j}", f"d{i}"] = 1000 * MB
    for i in range(4):
        net.join(f"m{i}", start=4)
    net.measure()
    first = net.new_epoch()
    epoch = net.pass_update() or first
    assert "hierarchical" in {name for _, name in epoch.plan.choices["all_reduce"]}
    sites = [member.site for member in epoch.members]
    assert sum(a != b for a, b in zip(sites, sites[1:] + sites[:1], strict=True)) == 2


def test_machines_that_several_members_share_are_sites():
    net = Net(rtt=0.1, speed=12 * MB)
    for i, host in enumerate(("192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.3")):
        net.arrive(f"d{i}", host=host)
    for i in range(4):
        net.join(f"m{i}", start=4)
    net.measure()
    first = net.new_epoch()
    epoch = net.pass_update() or first
    assert {member.name: member.site for member in epoch.members} == {
        "m0": "192.0.2.1", "m1": "", "m2": "192.0.2.1", "m3": "",
    }  # fmt: skip
    assert "hierarchical" in {name for _, name in epoch.plan.choices["all_reduce"]}


def test_the_ring_goes_around_the_slow_path(net):
    """d2 -> d0 is slow in that direction only, which shows when a ring has brought the two together."""
    net.start(3)
    net.speeds = {("d2", "d0"): 5 * MB}
    net.tell("d2", m.LinkMeasure("d0", 0, 5 * MB, 0, 0))
    epoch = net.pass_update()
    assert epoch is not None
    names = [member.name for member in epoch.members]
    assert names == ["m0", "m2", "m1"]
    assert any("ring order bottleneck 5 MB/s -> 50 MB/s" in text for text in net.said("plan"))
    assert "plan: ring order" in epoch.reason
    assert net.pass_update() is None  # it stays


def test_the_event_names_no_change_that_cannot_be_seen(net):
    """Latencies that differ by less than is shown, and rates above a thousand megabytes per second."""
    net.rtts = {frozenset({"d0", "d1"}): 0.08004}
    net.start(4)
    net.speeds = {("d1", "d2"): 5 * MB}
    net.tell("d1", m.LinkMeasure("d2", 0, 5 * MB, 0, 0))
    for one, other in (("d0", "d2"), ("d2", "d1"), ("d1", "d3"), ("d3", "d0"), ("d0", "d1"), ("d2", "d3")):
        for source, target in ((one, other), (other, one)):
            if (source, target) != ("d1", "d2"):
                net.tell(source, m.LinkMeasure(target, 0, 12_500 * MB, 0, 0))
    assert net.pass_update() is not None
    [text] = [text for text in net.said("plan") if "ring order" in text]
    assert re.search(r"ring order bottleneck 5 MB/s -> 12.5 GB/s(;|$)", text), text


def test_a_pair_that_could_not_meet_may_be_neighbours_again_after_a_while(net):
    net.start(4)
    net.link_down("m0", "m1", "unreachable")
    net.sleep(2 * net.limits.link_settle)
    assert net.new_epoch().plan.avoid == [(1, 2)]
    assert net.names == ["m0", "m2", "m1", "m3"]
    for a in range(4):  # the first order would be much faster
        net.tell(f"d{a}", *(m.LinkMeasure(f"d{b}", 0, (90 if b == (a + 1) % 4 else 1) * MB, 0, 0) for b in range(4)))
    kept = net.pass_update()
    assert kept is None or kept.plan.avoid == [(1, 2)]
    net.sleep(BAD_PAIR_SECONDS)
    net.tell("d0", m.LinkMeasure("d1", 0, 91 * MB, 0, 0))
    moved = net.pass_update()
    assert moved is not None
    assert moved.plan.avoid == []
    assert net.names == ["m0", "m1", "m2", "m3"]


def test_a_path_that_is_known_to_be_slow_is_avoided_from_the_start(net):
    net.speeds = {("d0", "d1"): 5 * MB}
    epoch = net.start(4)
    assert [member.name for member in epoch.members][:2] != ["m0", "m1"]
    assert epoch.plan.pacing == 50 * MB // 8


def test_noise_changes_nothing(net):
    net.start(4)
    assert net.pass_update() is None
    for round_number in range(5):
        for i, daemon in enumerate(net.conns):
            factor = 1 + 0.05 * ((i + round_number) % 3 - 1)
            net.tell(daemon, m.LinkMeasure(f"d{(i + 1) % 4}", 0.08 * factor, 50 * MB * factor, 8, 0))
        assert net.pass_update() is None


def test_losses_keep_connections_and_order_as_they_were(net):
    net.start(4)
    before = net.group.planned.plan
    net.uplinks(10 * MB, 8)
    net.drop("d2")
    epoch = net.new_epoch()
    assert [member.name for member in epoch.members] == ["m0", "m1", "m3"]
    assert (epoch.plan.lanes, epoch.plan.pacing, epoch.plan.congestion) == (
        before.lanes,
        before.pacing,
        before.congestion,
    )
    assert chosen(epoch.plan.choices["all_reduce"], 1) == "full_exchange"


# ---- lanes ------------------------------------------------------------------------------------------


def climb(net: Net, carries: dict[int, float], rounds: int = 8) -> list[int]:
    """The numbers of lanes that are used one after the other, where so many carry *carries* of them."""
    lanes = [net.group.planned.plan.lanes]
    for _ in range(rounds):
        net.uplinks(carries[lanes[-1]], lanes[-1])
        epoch = net.pass_update()
        if epoch is not None and epoch.plan.lanes != lanes[-1]:
            lanes.append(epoch.plan.lanes)
    return lanes


@pytest.mark.parametrize(
    ("carries", "expected"),
    [
        ({8: 10 * MB, 16: 20 * MB, 32: 30 * MB}, [8, 16, 32]),  # and no further: max_lanes
        ({8: 10 * MB, 16: 20 * MB, 32: 20.5 * MB}, [8, 16, 32, 16]),  # the last doubling gained too little
        ({8: 10 * MB, 16: 10 * MB}, [8, 16, 8]),
        ({8: 48 * MB}, [8]),  # as much as probes found
        ({8: 10 * MB, 16: 49 * MB}, [8, 16]),
    ],
)
def test_lanes_are_doubled_until_they_gain_little_and_then_stay(net, carries, expected):
    net.start(3, controls=())
    assert climb(net, carries) == expected
    assert climb(net, dict.fromkeys((8, 16, 32), 40 * MB), 3)[1:] == []  # settled


def test_lanes_stay_within_what_every_daemon_allows(net):
    net.arrive("d1", max_lanes=8, controls=())
    net.arrive("d0", "d2", controls=())
    for i in range(3):
        net.join(f"m{i}", start=3)
    net.measure()
    net.epochs()
    assert climb(net, {8: 10 * MB}, 3) == [8]


def test_bbr_needs_no_more_lanes_than_hold_what_is_under_way(net):
    net.start(3)
    assert climb(net, {8: 10 * MB}, 5) == [8]
    fast = Net(rtt=0.1, speed=500 * MB)
    plan = fast.start(3, cores=1).plan
    assert plan.lanes == 32  # 50 MB under way, 2 MiB on each lane
    assert plan.lane_groups == 4  # so that four threads may serve them, where there are cores


def on_one_machine(*cores: int) -> Room:
    """A group that has formed, a member on a daemon for each of *cores*."""
    room = Room()
    for i, each in enumerate(cores):
        room.hello(f"d{i}", addresses=(f"127.0.0.1:{i + 1}",), lanes=8, cores=each)
        room.join(f"m{i}", start=len(cores))
    return room


@pytest.mark.parametrize(
    ("cores", "groups", "stripe"),
    [
        ((2, 2), 1, LOCAL_STRIPE),
        ((4, 4), 2, SHARED_STRIPE),
        ((16, 16), 8, SHARED_STRIPE),
        ((64, 6, 64), 2, SHARED_STRIPE),
        ((16,) * 4, 4, SHARED_STRIPE),
        ((16,) * 9, 1, LOCAL_STRIPE),
        ((0, 16), 1, LOCAL_STRIPE),
    ],
)
def test_an_operation_is_shared_by_the_threads_that_a_machine_has_cores_for(
    cores: tuple[int, ...], groups: int, stripe: int
) -> None:
    plan = on_one_machine(*cores).group.planned.plan
    assert (plan.lane_groups, plan.stripe, plan.turns) == (groups, stripe, False)


@pytest.mark.parametrize(("members", "groups", "stripe"), [(9, 1, LOCAL_STRIPE), (3, 5, SHARED_STRIPE)])
def test_survivors_keep_their_threads(members: int, groups: int, stripe: int) -> None:
    """Links stay as they are, so one thread more would have no lanes."""
    room = on_one_machine(*(16,) * members)
    left = room.group.members[:-1]
    plan = propose(Request(room.state.measures, left, room.group.planned, [], 0.0, free=False)).planned.plan
    assert (plan.lane_groups, plan.stripe) == (groups, stripe)


def test_between_machines_each_has_its_own_cores():
    net = Net(rtt=0.0004)
    net.arrive("d0", "d1", cores=16)
    net.arrive("d2", cores=3)
    for i in range(3):
        net.join(f"m{i}", start=3)
    net.measure()
    assert net.new_epoch().plan.lane_groups == 3


def test_one_silent_uplink_keeps_lanes_as_they_are(net):
    net.start(3, controls=())
    net.tell("d0", uplink=10 * MB, lanes=8)
    net.tell("d1", uplink=10 * MB, lanes=8)
    net.pass_update()
    assert net.group.planned.plan.lanes == 8


@pytest.mark.parametrize(("lost", "all_paces"), [(0.0, [50, 70]), (0.05, [50, 70, 59.1, 50])])
def test_a_pace_follows_what_operations_carry_and_is_lowered_only_where_packets_are_lost(net, lost, all_paces):
    paces = [net.start(3).plan.pacing]
    for carried in (20 * MB, 48.5 * MB, *[70 * MB] * 3, *[45 * MB] * 20):  # the daemons raise the pace, too
        net.uplinks(carried, 8)
        net.tell("d0", m.LinkMeasure("d1", 0.08, 0, 8, lost))
        epoch = net.pass_update()
        if epoch is not None:
            paces.append(epoch.plan.pacing)
    assert [round(8 * pace / MB, 1) for pace in paces] == all_paces


def test_a_machine_that_is_busy_for_a_while_leaves_the_pace_as_it_was(net):
    before = net.start(3).plan.pacing
    for carried in [10 * MB] * 30 + [40 * MB] * 10:
        net.uplinks(carried, 8)
        net.tell("d0", m.LinkMeasure("d1", 0, 12 * MB, 0, 0))  # a probe meanwhile
        net.pass_update()
    assert net.group.planned.plan.pacing == before


def test_lanes_are_tried_only_after_some_looks(net, monkeypatch):
    monkeypatch.setattr(planning, "LANE_LOOKS", 3)
    net.start(3, controls=())
    for _ in range(2):
        net.uplinks(10 * MB, 8)
        assert net.pass_update() is None
    net.uplinks(10 * MB, 8)
    assert net.pass_update().plan.lanes == 16


def test_looks_for_better_plans_are_not_too_often(net):
    net.start(3, controls=())
    net.sleep(LOOK_SECONDS)
    net.uplinks(10 * MB, 8)
    net.all_update(1)
    assert net.new_epoch().plan.lanes == 16
    net.uplinks(20 * MB, 16)
    net.all_update(2)
    net.no_epoch()
    net.sleep(LOOK_SECONDS)  # the first look found something: the next one comes after twice the time
    net.all_update(3)
    net.no_epoch()
    net.sleep(LOOK_SECONDS)
    net.all_update(4)
    assert net.new_epoch().plan.lanes == 32


# ---- what goes wrong, and what is shown -------------------------------------------------------------


def test_impossible_measurements_end_the_connection(net):
    net.start(2)
    conn = net.conns["d1"]
    net.tell("d1", m.LinkMeasure("d0", float("nan"), 0, 0, 0))
    assert "impossible measurements" in net.closed[conn]


def test_what_is_known_of_a_lost_daemon_is_forgotten(net):
    net.start(3)
    net.drop("d2")
    assert all("d2" not in ends for ends in (*net.state.measures.paths, *net.state.asked))


def test_status_asks_daemons_what_they_send_and_says_it(net):
    net.start(2)
    assert [link.sent for link in report.links(net.state)] == [0, 0]
    net.step(Received(net.conns["d0"] + 1000, m.StatusRequest(PROTOCOL_VERSION)))
    net.say("d0", m.Heartbeat(2, [], moved=[("d1", 7000, 9, 0)]))
    assert net.take("d0", m.Pong)[-1].watched
    assert [link.sent for link in report.links(net.state)] == [7000, 0]


def test_status_has_the_paths_and_the_plan(net):
    net.start(2)
    links = report.links(net.state)
    assert links == [
        m.LinkStatus("d0", "d1", 0.08, 50 * MB, 0, 0),
        m.LinkStatus("d1", "d0", 0.08, 50 * MB, 0, 0),
    ]
    [group] = report.groups(net.state, net.now)
    assert group.name == GROUP
    assert group.plan.plan == net.group.planned.plan
    assert (group.plan.bottleneck, group.plan.round) == (50 * MB, pytest.approx(0.08))
    assert (group.plan.alpha, group.plan.beta) == (pytest.approx(0.04, rel=0.05), pytest.approx(2e-8))
    assert group.lanes == 8
    packed = msgspec.msgpack.encode(m.Status(1, 0.0, "v", [], [group], [], links))
    assert msgspec.msgpack.decode(packed, type=m.FromMaster).groups[0].plan == group.plan


def test_the_clock_is_set_for_everything_that_is_waited_for(net):
    net.arrive("d0", "d1")
    net.join("m0", start=2)
    net.join("m1", start=2)
    assert net.state.deadline <= net.now + WAIT

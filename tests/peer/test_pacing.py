"""The pace of lanes, by what a path does with it: no sockets, no engine."""

from __future__ import annotations

from wancoll.limits import MIB
from wancoll.peer.core.paths import pacing
from wancoll.peer.core.paths.pacing import Pacer
from wancoll.peer.core.paths.tcpinfo import TcpInfo

LANES = 8
PACKET = 1448


class Path:
    """A path that carries *rate* bytes per second of one link; what is sent faster than *queue* times that is lost.

    With *room* (seconds) that waits first, so that round trips grow.
    """

    def __init__(
        self,
        rate: float,
        planned: float,
        *,
        queue: float = 1.1,
        loss: float = 0.0,
        number: int = 1,
        room: float = 0.0,
        rtt: float = 0.04,
    ) -> None:
        self.rate, self.queue, self.loss, self.number = rate, queue, loss, number
        self.room, self.waits, self.rtt = room, 0.0, rtt
        self.planned = int(planned / LANES)
        self.pace = self.planned
        self.pacer = Pacer()
        self.now = 0.0
        self.acked = self.busy = self.segments = self.lost = 0.0
        self.changes = 0
        self.look()

    def look(self) -> None:
        each = [int(value / LANES) for value in (self.acked, self.segments, self.lost)]
        lane = TcpInfo(self.rtt + self.waits, self.rtt, 0.0, True, each[0], each[1], each[2], self.busy, 0)
        lanes = {(i, 1): lane for i in range(LANES)}
        for (number, _), pace in self.pacer.look(self.now, {(self.number, None): (self.planned, lanes)}).items():
            assert number == self.number
            self.pace = pace
            self.changes += 1

    def run(self, seconds: float, *, share: float = 1.0, busy: float = 1.0) -> float:
        """An operation, *share* of whose speed the machine can give now; returns bytes per second that it carried."""
        before = self.acked, self.now
        while self.now < before[1] + seconds - 1e-9:
            self.now += 0.25
            sent = max(1.0, min(self.pace * LANES * 0.95, self.rate * share * self.queue * 1.5))
            carried = min(sent, self.rate * share)
            self.waits = min(self.room, max(0.0, self.waits + 0.25 * (sent / self.rate - 1)))
            full = self.waits >= self.room
            over = (max(0.0, 1 - self.rate * self.queue / sent) if full else 0.0) + self.loss
            self.acked += carried * 0.25 * busy
            self.busy += 0.25 * busy
            self.segments += sent * 0.25 * busy / PACKET
            self.lost += over * sent * 0.25 * busy / PACKET
            self.look()
        return (self.acked - before[0]) / seconds


def test_a_pace_that_was_measured_on_a_busy_machine_recovers_while_operations_run() -> None:
    path = Path(60 * MIB, planned=18 * MIB)
    assert path.run(0.5) < 0.4 * path.rate
    path.run(10.0)
    assert path.run(5.0) > 0.9 * path.rate


def test_operations_of_a_busy_machine_change_nothing_and_later_ones_get_all() -> None:
    path = Path(60 * MIB, planned=66 * MIB)
    path.run(30.0, share=0.3)
    assert path.changes == 0
    assert path.run(5.0) > 0.9 * path.rate


def test_a_pace_at_which_packets_are_lost_is_left_and_tried_ever_more_seldom() -> None:
    path = Path(60 * MIB, planned=40 * MIB)
    path.run(60.0)
    early = path.changes
    assert path.pace * LANES <= pacing.STEP * path.queue * path.rate
    path.run(240.0)
    assert path.run(5.0) > 0.9 * path.rate
    assert path.changes - early < 20
    assert path.pace >= path.planned


def test_a_path_that_loses_a_hundredth_anyhow_is_filled_all_the_same() -> None:
    path = Path(60 * MIB, planned=18 * MIB, loss=0.01)
    path.run(10.0)
    assert path.run(5.0) > 0.9 * path.rate


def test_a_path_that_loses_many_packets_anyhow_keeps_the_plans_pace() -> None:
    path = Path(60 * MIB, planned=18 * MIB, loss=0.2)
    path.run(60.0)
    assert path.changes == 0


def test_a_pace_that_a_queue_answers_is_not_raised_further_and_nothing_is_lost() -> None:
    path = Path(60 * MIB, planned=67 * MIB, room=0.5, rtt=0.1)
    path.run(20.0)
    assert path.changes == 0
    path = Path(60 * MIB, planned=40 * MIB, room=0.5, rtt=0.1)
    assert path.run(20.0) > 0.75 * path.rate
    assert path.lost == 0


def test_what_the_pace_of_before_has_lost_lowers_it_once() -> None:
    path = Path(60 * MIB, planned=21 * MIB)
    link = path.pacer._links[1, None]
    for _ in range(40):
        path.run(0.25)
        if link.drains:
            break
    reached = path.pace
    assert reached == link.proven > path.planned
    path.lost += 0.1 * path.segments  # of packets that were under way
    path.run(1.0)
    assert path.pace == reached


def test_a_path_that_becomes_slow_leaves_a_pace_that_it_had_reached() -> None:
    path = Path(60 * MIB, planned=18 * MIB)
    path.run(10.0)
    path.rate = 20 * MIB
    path.run(10.0)
    assert path.pace * LANES < 1.1 * path.queue * path.rate


def test_a_full_path_leaves_the_pace_that_it_carries() -> None:
    path = Path(60 * MIB, planned=42 * MIB, room=0.02, queue=1.0)
    path.run(3.0)
    assert 0.9 * path.rate < path.pace * LANES < 1.05 * path.rate


def test_a_pace_has_a_bound_and_short_looks_add_up() -> None:
    path = Path(1e12, planned=1 * MIB)
    path.run(200.0, busy=0.1)
    assert path.pace == int(pacing.MOST * path.planned)


def test_another_plan_begins_anew_and_what_is_closed_is_forgotten() -> None:
    path = Path(60 * MIB, planned=18 * MIB)
    path.run(10.0)
    assert path.pace > path.planned
    path.planned = path.pace = path.planned + 1
    changes = path.changes
    path.look()
    assert (path.changes, path.pace) == (changes, path.planned)
    path.planned = path.pace = path.planned // 10
    path.look()
    path.run(10.0)
    assert path.pace > 2 * path.planned, "from the new plan's pace upwards"
    assert path.pacer.look(path.now, {}) == {}
    assert not path.pacer._links
    unpaced = Path(60 * MIB, planned=0)
    unpaced.run(10.0, share=0)
    assert unpaced.changes == 0


def test_tries_at_a_higher_pace_never_end_and_come_back_to_the_plans() -> None:
    path = Path(60 * MIB, planned=60 * MIB + LANES)
    path.run(3000.0)
    before, lowest = path.changes, path.pace
    for _ in range(1000):
        path.run(1.0)
        lowest = min(lowest, path.pace)
    assert path.changes - before >= 6, "up and down again, every five minutes at least"
    assert lowest == path.planned


def test_lanes_over_another_uplink_have_a_pace_of_their_own_and_one_that_is_dialled_again_gets_it() -> None:
    pacer = Pacer()
    paces = {"wide": 1000 * PACKET, "narrow": 1000 * PACKET}
    carries = {"wide": 4000 * PACKET, "narrow": 300 * PACKET}
    acked = dict.fromkeys(paces, 0)

    def look(now: float, dialled_again: bool = False) -> dict[str, int]:
        looks = {}
        for i, (name, pace) in enumerate(paces.items()):
            acked[name] += int(min(pace, carries[name]))
            info = TcpInfo(0.04, 0.04, 0.0, True, acked[name], acked[name] // PACKET, 0, now, 0)
            looks[1, ("here", name)] = (1000 * PACKET, {(i, int(dialled_again)): info})
        found = {ends[1]: pace for (_, ends), pace in pacer.look(now, looks).items() if ends is not None}
        paces.update(found)
        return found

    for now in range(20):
        look(float(now + 1))
    assert 3800 * PACKET < paces["wide"] <= pacing.STEP * 4000 * PACKET
    assert paces["narrow"] == 1000 * PACKET
    carries = dict.fromkeys(paces, 0)  # each new connection has had as many bytes acknowledged as the old one
    assert look(20.1, dialled_again=True) == {"wide": paces["wide"]}
    assert look(20.2, dialled_again=True) == {}

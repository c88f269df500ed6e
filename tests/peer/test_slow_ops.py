"""What a daemon says of its slow operations: which, at which stage, and how the links are that they need."""

from __future__ import annotations

from tests.peer.test_member import Driver
from wancoll.collective import Descriptor, Kind
from wancoll.peer.core.liveness import slow_ops
from wancoll.peer.core.liveness.slow_ops import SAID_AGAIN, WaitLog
from wancoll.peer.core.liveness.stalls import LinkView
from wancoll.peer.core.op import OpState
from wancoll.wire import messages as m

SLOW = 1.0


def seen(other: int, state: str = "idle", since: float = 3.0, *, p2p: bool = False, still: float = 3.0):
    return slow_ops.Seen(other, p2p, LinkView(state, since, 0.5, 100, still), "no answer" if state == "down" else "")


def names(mid: int) -> str:
    return f"m{mid}"


def test_nothing_is_said_while_nothing_is_slow() -> None:
    d = Driver(1, 2, 3)
    links = [seen(2, "dead"), seen(3, "down")]
    assert slow_ops.report(d.member, links, 100.0, SLOW) is None
    d.post()  # at 1.0
    assert slow_ops.report(d.member, links, 1.9, SLOW) is None
    assert slow_ops.report(d.member, links, 2.0, SLOW) is not None


def test_an_operation_that_moves_names_its_links_the_bad_ones_first() -> None:
    d = Driver(1, 2, 3, 4)
    d.post()
    links = [seen(2, "idle"), seen(4, "dead"), seen(3, "down"), seen(2, "parked", 0.5, p2p=True)]
    told = slow_ops.report(d.member, links, 4.5, SLOW)
    assert told is not None
    assert (told.group, told.mid, told.epoch) == ("g", 1, 1)
    [op] = told.ops
    assert (op.seq, op.what, op.nbytes, op.stage) == (1, "all_reduce(4 x float32, op=sum)", 16, "moving")
    assert (op.age, op.still) == (3.5, 3.0)
    assert [(link.other, link.state) for link in told.links] == [(4, "dead"), (2, "idle")]  # the ring needs no more
    assert (told.links[0].since, told.links[0].heard, told.links[0].backlog) == (3.0, 0.5, 100)
    words = slow_ops.local_words(told, names)
    assert words == (
        "operation 1 (all_reduce(4 x float32, op=sum)) has not ended 3.5 s after it was called: "
        "the link to m4 is dead for 3.0 s"
    )


def test_an_operation_that_waits_for_its_own_client() -> None:
    d = Driver(1, 2, 3)
    d.post()
    asked = []

    def lacks_input(op: object) -> bool:
        asked.append(op)
        return True

    told = slow_ops.report(d.member, [seen(2), seen(3)], 4.0, SLOW, lacks_input)
    assert told is not None
    assert told.ops[0].stage == "input"
    assert slow_ops.local_words(told, names).endswith("its own client has not filled its input")
    assert asked == list(d.member.collectives.open.values())


def test_an_operation_that_waits_for_links() -> None:
    d = Driver(1, 2, 3, linked=(2,))
    d.member.collectives.link_lost(2, "cut")
    d.post()
    told = slow_ops.report(d.member, [seen(2, "down"), seen(3, "idle")], 4.0, SLOW)
    assert told is not None
    assert told.ops[0].stage == "links"
    assert [(link.other, link.state, link.reason) for link in told.links] == [(2, "down", "no answer"), (3, "idle", "")]
    assert "the link to m2 is down for 3.0 s no answer" in slow_ops.local_words(told, names)


def test_an_operation_that_is_done_here() -> None:
    d = Driver(1, 2)
    d.post()
    d.member.op_finished(d.engine_id, digest=7, bytes_sent=9)
    assert d.member.collectives.open[1].state is OpState.done
    told = slow_ops.report(d.member, [seen(2)], 4.0, SLOW)
    assert told is not None
    assert told.ops[0].stage == "done"
    called = "operation 1 (all_reduce(4 x float32, op=sum)) has not ended 3.0 s after it was called: "
    here, away = "it is finished here and waits for ", "the master at h:1, away for 2.0 s"
    assert slow_ops.local_words(told, names) == f"{called}{here}the others"
    assert slow_ops.local_words(told, names, None, away) == f"{called}{here}{away}"
    assert slow_ops.local_words(told, names, frozenset({2})) == f"{called}{here}m2"
    assert slow_ops.local_words(told, names, frozenset({2}), away) == f"{called}{here}m2; not there: {away}"


def test_a_send_that_is_alone() -> None:
    d = Driver(1, 2, 3)
    call = m.Post(1, Descriptor(Kind.send, count=4), 0, 4096, 1, 2, 5)
    d.member.post(call, d.member.call(call), 1.0)
    told = slow_ops.report(d.member, [seen(3, p2p=True)], 4.0, SLOW)
    assert told is not None
    [op] = told.ops
    assert (op.seq, op.stage, op.other, op.age) == (0, "alone", 3, 3.0)
    assert op.what.startswith("send(4 x ")
    assert told.links == []
    assert slow_ops.local_words(told, names).endswith("m3 has not called its half")


def test_bytes_that_wait_for_the_clients_call_are_told_without_an_operation() -> None:
    d = Driver(1, 2, 3)
    told = slow_ops.report(d.member, [seen(2, "parked", 1.2), seen(3, "parked", 0.2)], 4.0, SLOW)
    assert told is not None
    assert told.ops == []
    assert [(link.other, link.state) for link in told.links] == [(2, "parked")]
    assert slow_ops.local_words(told, names) == ""


def test_no_more_than_the_oldest_are_told() -> None:
    d = Driver(1, 2)
    for _ in range(3 * slow_ops.MOST_OPS):
        d.post()
    told = slow_ops.report(d.member, [seen(2)], 4.0, SLOW)
    assert told is not None
    assert [op.seq for op in told.ops] == list(range(1, slow_ops.MOST_OPS + 1))


def test_for_the_daemons_own_status() -> None:
    d = Driver(1, 2)
    d.post()
    told = slow_ops.report(d.member, [seen(2, "blocked")], 4.0, SLOW)
    found = slow_ops.plain(told, names)
    assert found["operations"] == [
        {"seq": 1, "what": "all_reduce(4 x float32, op=sum)", "nbytes": 16, "stage": "moving", "seconds": 3.0,
         "still": 3.0},
    ]  # fmt: skip
    [link] = found["links"]
    assert (link["member"], link["state"], link["seconds"], link["backlog"]) == ("m2", "blocked", 3.0, 100)
    assert slow_ops.plain(None, names) == {"operations": [], "links": []}


def test_how_far_the_client_is() -> None:
    d = Driver(1, 2)
    assert (d.member.collectives.called, d.member.oldest_call) == (0, 0)
    d.post()
    d.post()
    assert (d.member.collectives.called, d.member.oldest_call) == (2, 1)
    d.member.op_finished(100, digest=7, bytes_sent=9)
    d.member.hear(m.Commit("g", 1, 1, 1), 3.0, 1, 1)
    assert (d.member.collectives.called, d.member.oldest_call) == (2, 2)


def test_the_daemons_log_says_it_once() -> None:
    log = WaitLog()
    assert log.begins(1, 10.0, 12.0)
    assert not log.begins(1, 10.0, 13.0)
    assert log.ended(1, 13.0) == 0.0
    assert log.ended(2, 14.0) == 4.0
    assert not log.begins(2, 13.0, 15.0)
    assert log.ended(None, 16.0) == 0.0
    assert log.begins(3, 40.0, 12.0 + SAID_AGAIN)

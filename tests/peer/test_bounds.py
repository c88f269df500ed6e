"""What a daemon keeps of its links and calls has bounds: each is filled, and does not grow."""

from __future__ import annotations

from types import SimpleNamespace

import trio

from tests.peer.test_links import End
from tests.peer.test_member import Driver
from tests.peer.test_p2p import Partner
from wancoll.collective import Kind
from wancoll.limits import DEFAULT
from wancoll.peer.config import PeerConfig
from wancoll.peer.core import links as core
from wancoll.peer.core.liveness.stalls import LaneLook, Stalls
from wancoll.peer.core.paths.pacing import Pacer
from wancoll.peer.core.paths.tcpinfo import Observer, TcpInfo
from wancoll.peer.watch.measure import Measurer
from wancoll.wire import messages as m

MANY = 3000
LANE = TcpInfo(0.1, 0.1, 0.0, True, 0, 0, 0, 0.0, 0)


def test_dials_of_an_epoch_that_is_not_known_here_wait_in_a_bounded_line() -> None:
    links = core.Links(DEFAULT)
    hello = m.LaneHello(1, "g", b"k" * 16, 2, 1, 0, 7, 0, 1)
    refused = 0
    for knock in range(MANY):
        refused += len(links.step(core.Knock(knock, hello), 1.0))
    assert refused == MANY - DEFAULT.pending_connections
    assert len(links.step(core.Tick(), links.deadline())) == DEFAULT.pending_connections
    assert links.deadline() == float("inf")


def test_links_are_to_members_of_the_epoch_and_one_set_each() -> None:
    end = End(1, {2, 4})
    for generation in range(1, MANY):
        for sender in (2, 3, 4, 99):
            end.knock(sender, generation)
    assert len(end.owner.links) <= 3
    assert len(end.links.open()) <= 3


def test_what_a_new_master_is_told_is_bounded() -> None:
    d = Driver(1, 2, 3)
    for call in range(MANY):
        d.member.collectives.link_lost(2, f"reset {call}")
        d.member.master_session.say(m.GiveUp("g", 1, 1, [call + 1], "root lost"))
    assert len(d.member.master_session.said) <= 1025
    p = Partner()
    for call in range(1, MANY):
        p.call(Kind.send, 1)
        p.match(call, call)
        if call % 2:
            told = m.Settled("g", 1, 1, call, 7, "CollectiveMismatch", "what", {}, call)
            p.member.p2p.settled(told, 3.0)
        else:
            p.settle(call)
    assert (len(p.member.p2p.settlements), len(p.member.p2p.failed), p.member.in_flight) == (1024, 1024, 0)
    assert min(p.member.p2p.settlements) > MANY // 4


def test_watchers_forget_links_that_are_closed() -> None:
    pacer, stalls, observer = Pacer(), Stalls(), Observer()
    for number in range(MANY):
        now = float(number)
        pacer.look(now, {(number, None): (1000, {(0, 1): LANE})})
        stalls.look(now, {number: {0: LaneLook(0, 0, False, LANE)}})
        observer.look({number: (f"d{number}", {0: LANE})})
    assert len(pacer._links) == len(stalls._links) == len(observer._before) == len(observer._paths) == 1


async def test_paths_to_measure_wait_in_a_bounded_line() -> None:
    measurer = Measurer(SimpleNamespace(config=PeerConfig(master="h:1")), lambda: False)
    for number in range(MANY):
        measurer.measure(m.MeasureLink(f"d{number}", ["h:1"], 0))
    assert measurer._asks.statistics().current_buffer_used == 1024
    await trio.lowlevel.checkpoint()

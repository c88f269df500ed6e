"""Lanes through a proxy that breaks them: flipped bits, ends in mid frame, delays, slowness, one-way cuts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from tests.faults.support import Background, attempt, check_agreed, close_all, contribution, join, new_group, reduce_all
from wancoll.chaos import Cluster
from wancoll.errors import OperationAborted
from wancoll.testing import Proxies
from wancoll.testing.proxy import proxied_cluster

PEERS = 3
COUNT = 1 << 18  # elements: 1 MiB


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[Cluster, Proxies]]:
    options = ["--max-lanes=2", "--lane-timeout=2", "--link-timeout=3", "--connect-timeout=2"]
    with proxied_cluster(PEERS, fork=True, lanes=2, peer_args=options) as both:
        yield both


@pytest.fixture
def group(proxied: tuple[Cluster, Proxies]) -> Iterator[tuple[Proxies, list[Any]]]:
    """Three members that have reduced once. Rules that the test leaves behind are cleared."""
    cluster, proxies = proxied
    comms = join(cluster, range(PEERS), group=new_group())
    try:
        reduce_all(comms, range(PEERS), COUNT)
        yield proxies, comms
    finally:
        proxies.clear_all()
        close_all(comms)


def reduced(comms: list[Any]) -> tuple[list[Any], float]:
    """Outcomes of one sum that everybody takes part in and agrees on, and how long it took."""
    tensors = [contribution(i, COUNT) for i in range(PEERS)]
    running = Background(lambda i: attempt(lambda: comms[i].all_reduce(tensors[i], op="sum")), PEERS)
    outcomes = running.results(30)
    assert sorted(check_agreed(outcomes, tensors)) == ["m0", "m1", "m2"]
    assert all((tensor == np.float32(111)).all() for tensor in tensors)
    return outcomes, time.monotonic() - running.started


@pytest.mark.parametrize("kind", ["flip", "truncate"])
def test_what_breaks_costs_no_bytes_and_a_try_only_where_they_were_wrong(
    group: tuple[Proxies, list[Any]], kind: str
) -> None:
    """A connection that ends in the middle of a frame costs the rest of it: it comes over another one."""
    proxies, comms = group
    rules = [proxies.add(kind, 0, other, amount=1000) for other in (1, 2)]
    outcomes, _ = reduced(comms)
    assert any(proxies.fired(rule, 0) for rule in rules)
    more = any(outcome.receipt.attempts > 1 for outcome in outcomes)  # who calls after the break needs no other
    assert more == (kind == "flip")
    for rule in rules:
        proxies.clear(rule)
    reduced(comms)


def test_a_lane_for_notes_that_breaks_costs_no_round_and_no_epoch(group: tuple[Proxies, list[Any]]) -> None:
    """In the middle of a note or between two, one way or the other: votes that are lost with it are said again."""
    proxies, comms = group
    epoch, broke = comms[0].epoch, 0
    for k in range(12):
        source = k % PEERS
        to = (source + 1 + k % 2) % PEERS
        rule = proxies.add("truncate", source, to, lane=2, amount=37 * k % 140)
        outcomes, _ = reduced(comms)
        assert [(one.receipt.attempts, one.receipt.epoch) for one in outcomes] == [(1, epoch)] * PEERS
        broke += proxies.fired(rule, 0)
        proxies.clear(rule)
    assert broke > 4


@pytest.mark.parametrize("held", [0.0, 1.0], ids=["at once", "later"])
def test_all_lanes_of_a_link_that_are_reset_cost_no_round_and_no_epoch(
    group: tuple[Proxies, list[Any]], held: float
) -> None:
    """In the middle of an operation, as a home router does that is started again; new ones come through later."""
    proxies, comms = group
    epoch = comms[0].epoch
    for ends in permutations(range(PEERS), 2):
        proxies.add("slow", *ends, amount=4e6)
    for source, to in ((0, 1), (2, 1), (0, 2)):
        tensors = [contribution(i, COUNT) for i in range(PEERS)]
        running = Background(lambda i, tensors=tensors: attempt(lambda: comms[i].all_reduce(tensors[i])), PEERS)
        time.sleep(0.1)  # in the middle is the test
        refuses = [proxies.add("refuse", *ends) for ends in ((source, to), (to, source)) if held]
        reset = proxies.add("reset", source, to), proxies.add("reset", to, source)
        assert not any(running.finished)
        assert any(proxies.fired(rule, 1) for rule in reset)
        time.sleep(held)
        for rule in (*refuses, *reset):
            proxies.clear(rule)
        outcomes = running.results(30)
        assert [(one.receipt.attempts, one.receipt.epoch) for one in outcomes] == [(1, epoch)] * PEERS
        assert sorted(check_agreed(outcomes, tensors)) == ["m0", "m1", "m2"]
        assert all((tensor == np.float32(111)).all() for tensor in tensors)


@pytest.mark.parametrize("late", [0.0, 1.2])
def test_a_lane_that_breaks_in_a_call_that_is_repeated(group: tuple[Proxies, list[Any]], late: float) -> None:
    """Such a call is the engine's, until the daemon takes over what takes longer than a heartbeat."""
    proxies, comms = group
    for _ in range(3):
        reduced(comms)
    proxies.throttle(3e5)
    rules = [proxies.add("truncate", 0, other, amount=1000 + 3e5 * late) for other in (1, 2)]
    outcomes, seconds = reduced(comms)
    assert any(proxies.fired(rule, 0) for rule in rules)
    assert [outcome.receipt.attempts for outcome in outcomes] == [1] * PEERS
    assert seconds > late
    proxies.clear_all()


@pytest.mark.parametrize(("kind", "amount"), [("delay", 0.3), ("slow", 1e6)])
def test_slow_lanes_cost_time_and_nobody(group: tuple[Proxies, list[Any]], kind: str, amount: float) -> None:
    proxies, comms = group
    rules = [proxies.add(kind, *ends, amount=amount) for ends in permutations(range(PEERS), 2)]
    outcomes, seconds = reduced(comms)
    assert seconds > 0.2
    assert all(outcome.receipt.attempts == 1 for outcome in outcomes)
    for rule in rules:
        proxies.clear(rule)
    assert any(reduced(comms)[1] < seconds for _ in range(5)), "they are as slow as before"


@pytest.mark.check
def test_a_cut_in_one_direction_is_noticed(group: tuple[Proxies, list[Any]]) -> None:
    """What m0 sends to m1 is lost, acknowledgements too: after lane_timeout the group finds a way or puts one out."""
    proxies, comms = group
    rule = proxies.add("oneway", 0, 1)
    tensors = [contribution(i, COUNT) for i in range(PEERS)]
    running = Background(lambda i: attempt(lambda: comms[i].all_reduce(tensors[i], op="sum")), PEERS)
    assert proxies.fired(rule, 10)
    outcomes = running.results(30)
    committed = [i for i in range(PEERS) if outcomes[i].error is None]
    assert len(committed) >= 2, [outcome.error for outcome in outcomes]
    check_agreed([outcomes[i] for i in committed], [tensors[i] for i in committed])
    for i in set(range(PEERS)) - set(committed):
        assert type(outcomes[i].error).__name__ == "Evicted"
        assert (tensors[i] == contribution(i, COUNT)).all()
    proxies.clear(rule)
    reduce_all([comms[i] for i in committed], committed, COUNT)


def exchanged(comms: list[Any]) -> tuple[list[Any], float]:
    """Outcomes of a send of m0 and the recv of m1, and how long they took."""
    ranks = {name: rank for rank, name in enumerate(comms[0].members)}
    tensors = [np.full(1000, i + 1, np.float32) for i in range(2)]
    calls = [
        lambda: comms[0].send(tensors[0], dest=ranks["m1"]),
        lambda: comms[1].recv(tensors[1], source=ranks["m0"]),
    ]
    running = Background(lambda i: attempt(calls[i]), 2)
    outcomes = running.results(30)
    for outcome in outcomes:
        assert outcome.error is None or (tensors[1] == 2).all()
    return outcomes, time.monotonic() - running.started


@pytest.mark.check
def test_a_link_for_sends_that_a_firewall_refuses_ends_them_on_both_sides_and_nothing_else(
    group: tuple[Proxies, list[Any]],
) -> None:
    """Only lanes for sends and recvs are refused, in both directions: the one for collectives works all the time."""
    proxies, comms = group
    epoch = comms[0].epoch
    rules = [proxies.add("refuse", *ends, sends=True) for ends in ((0, 1), (1, 0))]
    for _ in range(2):
        outcomes, seconds = exchanged(comms)
        for outcome in outcomes:
            assert isinstance(outcome.error, OperationAborted), outcome.error
            assert "cannot reach each other for sends and recvs" in str(outcome.error)
        assert seconds < 25
        reduced(comms)
    assert comms[0].epoch == epoch
    for rule in rules:
        proxies.clear(rule)
    outcomes, _ = exchanged(comms)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert (outcomes[1].receipt.out == 1).all()


@pytest.mark.parametrize("refused", [(0, 1), (1, 0)])
def test_where_only_one_end_can_dial_it_does(group: tuple[Proxies, list[Any]], refused: tuple[int, int]) -> None:
    """One of the two is the younger, whose turn it is: the elder makes the link."""
    proxies, comms = group
    rule = proxies.add("refuse", *refused, sends=True)
    outcomes, _ = exchanged(comms)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert (outcomes[1].receipt.out == 1).all()
    proxies.clear(rule)


@pytest.mark.check
def test_a_send_whose_bytes_are_lost_in_one_direction_ends_alike_on_both_sides(
    group: tuple[Proxies, list[Any]],
) -> None:
    """On lanes that are up, without a reset: found by lane_timeout, dialled in vain for link_timeout, then ended."""
    proxies, comms = group
    exchanged(comms)
    for ends in ((0, 1), (1, 0)):
        rule = proxies.add("oneway", *ends, sends=True)
        outcomes, seconds = exchanged(comms)
        assert seconds < 28
        kinds = {type(outcome.error) for outcome in outcomes}
        # Bytes that arrive, though nobody hears of it, are enough for a small one.
        assert kinds in ([{OperationAborted}] if ends == (0, 1) else [{OperationAborted}, {type(None)}])
        reduced(comms)
        assert len(comms[0].members) == PEERS
        proxies.clear(rule)
        outcomes, _ = exchanged(comms)
        assert [outcome.error for outcome in outcomes] == [None, None]

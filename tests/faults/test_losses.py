"""Members that stop, die, leave, come back or cannot be reached, and what the others and they themselves are told."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

import wancoll
from tests.faults.support import (
    AT_ONCE,
    BUSY,
    HEARTBEAT_TIMEOUT,
    MIB,
    PEERS,
    Background,
    Outcome,
    attempt,
    check_agreed,
    close_all,
    contribution,
    in_threads,
    join,
    killed_by_failpoint,
    new_group,
    reduce_all,
    states,
    sums,
    untouched,
    wait_joining,
    wait_until,
)
from wancoll.chaos import Cluster
from wancoll.errors import ConfigError, Evicted, OperationAborted, PeerDaemonLost, WorldTooSmall


def reduce_some(comms: list[Any], tensors: list[Any], **options: Any) -> list[Outcome]:
    return in_threads(
        lambda k: attempt(lambda: comms[k].all_reduce(tensors[k], op="sum", **options)), len(comms), timeout=30
    )


# ---- a stopped daemon --------------------------------------------------------------------------------


def last_heard(cluster: Cluster, name: str) -> float:
    """By time.monotonic(), or a little before, when the master heard the member last; it is stopped by now."""
    asked = time.monotonic()
    silent = [one.silent_for for group in cluster.status().groups for one in group.members if one.name == name]
    return asked - max(silent)


def stop_and_wake(cluster: Cluster, heartbeat_timeout: float, count: int) -> None:
    comms = join(cluster, range(PEERS))
    reduce_all(comms, range(PEERS))
    victim, survivors = 1, [0, 2, 3]
    tensors = [contribution(k, count) for k in range(PEERS)]
    cluster.pause(victim)
    stopped, heard = time.monotonic(), last_heard(cluster, f"m{victim}")
    running = sums(comms, tensors)
    wait_until(lambda: all(running.finished[k] for k in survivors), heartbeat_timeout + BUSY, "the survivors commit")
    assert not running.finished[victim]
    cluster.resume(victim)
    awake = time.monotonic()
    outcomes = running.results()
    took = min(outcomes[k].ended for k in survivors)
    print(f"survivors committed {took - stopped:.2f} s after the stop, {took - heard:.2f} s after its last word")
    assert heartbeat_timeout <= took - heard < heartbeat_timeout + BUSY
    agreed = check_agreed([outcomes[k] for k in survivors], [tensors[k] for k in survivors])
    assert sorted(agreed) == [f"m{k}" for k in survivors]
    assert isinstance(outcomes[victim].error, Evicted), repr(outcomes[victim].error)
    assert outcomes[victim].ended - awake < BUSY
    assert untouched(tensors[victim], victim)
    with pytest.raises(Evicted):
        comms[victim].all_reduce(tensors[victim])
    reduce_all([comms[k] for k in survivors], survivors)
    close_all(comms)


def test_paused_peer_is_evicted(cluster: Cluster) -> None:
    stop_and_wake(cluster, HEARTBEAT_TIMEOUT, MIB)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_paused_peer_is_evicted_after_the_default_3_seconds() -> None:
    with Cluster(PEERS, fork=True) as cluster:
        for _ in range(5):
            stop_and_wake(cluster, 3.0, 4 * MIB)


def test_a_short_pause_evicts_nobody(cluster: Cluster, comms: list[Any]) -> None:
    tensors = [contribution(k, 4 * MIB) for k in range(PEERS)]
    running = sums(comms, tensors)
    cluster.pause(2)
    time.sleep(0.5)  # the pause itself, far shorter than heartbeat_timeout
    cluster.resume(2)
    assert len(check_agreed(running.results(), tensors)) == PEERS
    reduce_all(comms, range(PEERS))


# ---- a killed client ---------------------------------------------------------------------------------


def reduce_forever(socket: str, group: str, member: int, count: int) -> Iterator[tuple[str, ...]]:
    """A client process: sums without end, yields each op's contributors. Values are checked here."""
    with wancoll.connect(socket=socket, group=group, name=f"m{member}", start_world=3, min_world=1) as comm:
        yield comm.members
        while True:
            tensor = contribution(member, count)
            yield check_agreed([attempt(lambda tensor=tensor: comm.all_reduce(tensor, op="sum"))], [tensor])


def rejoin(socket: str, group: str, member: int, count: int) -> tuple[str, ...]:
    """A client process that joins a running group, takes part in one sum and leaves."""
    with wancoll.connect(socket=socket, group=group, name=f"m{member}", start_world=3, min_world=1) as comm:
        tensor = contribution(member, count)
        return check_agreed([attempt(lambda: comm.all_reduce(tensor, op="sum"))], [tensor])


def events(cluster: Cluster, group: str) -> list[tuple[str, str]]:
    """Kinds and texts of the master's events of a group."""
    return [(event.kind, event.text) for event in cluster.status().events if event.group == group]


def reduce_all_of(comms: list[Any], members: list[int], contributors: set[str], count: int) -> None:
    tensors = [contribution(k, count) for k in members]
    assert set(check_agreed(reduce_some(comms, tensors), tensors)) == contributors


@pytest.mark.parametrize("count", [1000, 4 * MIB])
def test_killed_client_leaves_at_once_and_another_takes_its_place(cluster: Cluster, count: int) -> None:
    group = new_group()
    client = cluster.client(2, reduce_forever, group, 2, count)
    comms = in_threads(
        lambda k: cluster.connect(k, group=group, name=f"m{k}", start_world=3, min_world=1), [0, 1], timeout=30
    )
    assert sorted(client.next()) == ["m0", "m1", "m2"]
    reduce_all_of(comms, [0, 1], {"m0", "m1", "m2"}, count)
    # The client calls its second op on its own; these two wait in it until the client's kill takes it out.
    client.pause()
    tensors = [contribution(k, count) for k in (0, 1)]
    running = sums(comms, tensors)
    killed = time.monotonic()
    client.kill()
    outcomes = running.results()
    check_agreed(outcomes, tensors)
    assert max(outcome.ended for outcome in outcomes) - killed < AT_ONCE, "a dead client leaves at once"
    died = "lost m2: its client died: its connection closed without a goodbye"
    # The daemon of a dead client still ends an operation that the client had called: the survivors may be done first.
    losses = ("client died", "daemon died", "evicted", "left", "refused")
    wait_until(lambda: any(kind in losses for kind, _ in events(cluster, group)), 10, "the master tells of the loss")
    assert [one for one in events(cluster, group) if one[0] in losses] == [("client died", died)]
    wait_until(lambda: re.search(r"warning .*client died|client died.*warning", cluster.master_logs(200)), 10, "logged")
    reduce_all_of(comms, [0, 1], {"m0", "m1"}, count)
    assert cluster.running(2)

    again = cluster.client(2, rejoin, group, 2, count)
    wait_joining(cluster, group, "m2")
    in_threads(lambda k: comms[k].update_membership(), 2, 30)
    assert sorted(comms[0].members) == sorted(comms[1].members) == ["m0", "m1", "m2"]
    reduce_all_of(comms, [0, 1], {"m0", "m1", "m2"}, count)
    assert sorted(again.result()) == ["m0", "m1", "m2"]
    client.close()
    again.close()
    wait_until(lambda: ("left", "m2 left") in events(cluster, group), 10, "the one that closed has left")
    close_all(comms)


# ---- a stopped client --------------------------------------------------------------------------------


def reduce_until_out(socket: str, group: str, member: int, count: int) -> Iterator[tuple[str, str]]:
    """A client process that sums twice, and yields how each sum ended: "" or the error's name, and its text."""
    with wancoll.connect(socket=socket, group=group, name=f"m{member}", start_world=PEERS, min_world=1) as comm:
        yield "", ""
        while True:
            tensor = contribution(member, count)
            error = attempt(lambda tensor=tensor: comm.all_reduce(tensor, op="sum")).error
            assert error is None or untouched(tensor, member)
            yield ("", "") if error is None else (type(error).__name__, str(error))


def test_a_stopped_client_is_put_out_and_told_so(cluster: Cluster) -> None:
    group, count = new_group(), 1000
    client = cluster.client(3, reduce_until_out, group, 3, count)
    others = range(3)
    comms = in_threads(lambda k: cluster.connect(k, group=group, name=f"m{k}", start_world=PEERS), others, 30)
    assert client.next() == ("", "")
    reduce_all_of(comms, list(others), {"m0", "m1", "m2", "m3"}, count)
    stopped = time.monotonic()
    client.pause()
    tensors = [contribution(k, count) for k in others]
    outcomes: list[Outcome] = []
    while not outcomes or len(outcomes[0].receipt.contributors) > 3:  # it may have called the next one before its stop
        outcomes = sums(comms, tensors).results()
        agreed = check_agreed(outcomes, tensors)
        tensors = [contribution(k, count) for k in others]
    took = time.monotonic() - stopped
    assert sorted(agreed) == ["m0", "m1", "m2"]
    # Its daemon sees the stop at a heartbeat, and says at another that it lasts.
    assert HEARTBEAT_TIMEOUT <= took < HEARTBEAT_TIMEOUT + BUSY
    assert cluster.running(3)
    client.resume()
    error, text = client.next()
    while error == "":  # it had called more before its stop
        error, text = client.next()
    assert error == "Evicted"
    assert "training process is stopped" in text
    client.close()
    reduce_all_of(comms, list(others), {"m0", "m1", "m2"}, count)
    close_all(comms)


# ---- a daemon that comes back ------------------------------------------------------------------------


def test_killed_daemon_restarts_under_its_name_and_its_client_rejoins(cluster: Cluster) -> None:
    group = new_group()
    comms = join(cluster, range(PEERS), group=group)
    reduce_all(comms, range(PEERS))
    cluster.kill(3)
    reduce_all(comms[:3], range(3))
    with pytest.raises(PeerDaemonLost):
        comms[3].all_reduce(contribution(3, 10))
    cluster.restart_peer(3)
    joiner = Background(lambda k: cluster.connect(k, group=group, name="m3", start_world=PEERS, min_world=1), [3])
    wait_joining(cluster, group, "m3")
    in_threads(lambda k: comms[k].update_membership(), 3, 30)
    comms.pop().close()
    comms += joiner.results()
    assert {tuple(comm.members) for comm in comms} == {tuple(comms[0].members)}
    reduce_all(comms, range(PEERS))
    close_all(comms)


def test_a_second_daemon_of_the_same_name_ends_the_first(cluster: Cluster) -> None:
    """docs/protocol.md, race 9: one that is stopped loses its name after heartbeat_timeout, and not for the asking."""
    group = new_group()
    comms = join(cluster, [0, 1, 3], group=group)
    reduce_all(comms, [0, 1, 3])
    cluster.pause(3)
    heard = last_heard(cluster, "m3")
    tensors = [contribution(k, 1000) for k in (0, 1)]
    running = sums(comms, tensors)
    twin = cluster.add_peer(name=cluster.name(3))
    outcomes = running.results()
    assert sorted(check_agreed(outcomes, tensors)) == ["m0", "m1"]
    took = [outcome.ended - heard for outcome in outcomes]
    assert min(took) >= HEARTBEAT_TIMEOUT, "before heartbeat_timeout"
    assert max(took) < HEARTBEAT_TIMEOUT + BUSY, cluster.master_logs()
    joiner = Background(lambda k: cluster.connect(k, group=group, name="m3", start_world=3, min_world=1), [twin])
    wait_joining(cluster, group, "m3")
    in_threads(lambda k: comms[k].update_membership(), 2, 30)
    newcomer = joiner.results()[0]
    reduce_all([comms[0], comms[1], newcomer], [0, 1, 3])
    cluster.kill(3)  # else the old one, awake, and the new one take turns in ending each other
    close_all([*comms, newcomer])
    cluster.kill(twin)


# ---- on_failure="raise", and too small a world -------------------------------------------------------


def reduce_or_raise(comm: Any, tensors: list[Any]) -> list[Outcome]:
    """All in flight at once, with on_failure="raise"."""
    try:
        works = [comm.all_reduce(x, op="sum", async_op=True, on_failure="raise") for x in tensors]
    except PeerDaemonLost as bad:
        return [Outcome(None, bad, time.monotonic())] * len(tensors)
    return [attempt(lambda work=work: work.wait(timeout=20)) for work in works]


def check_same_fate(outcomes: list[Outcome], tensors: list[Any], members: list[int]) -> bool:
    """All members got OperationAborted and their tensors as they were, or none did; returns whether they committed."""
    if any(outcome.error is None for outcome in outcomes):
        check_agreed(outcomes, tensors)
        return True
    for k, outcome, tensor in zip(members, outcomes, tensors, strict=True):
        assert isinstance(outcome.error, OperationAborted), repr(outcome.error)
        assert untouched(tensor, k)
    return False


def test_on_failure_raise(cluster: Cluster, comms: list[Any]) -> None:
    victim, survivors = 0, [1, 2, 3]
    cluster.failpoint(victim, "mid_op", "kill")
    tensors = [[contribution(k, 4 * MIB)] for k in range(PEERS)]
    outcomes = in_threads(lambda k: reduce_or_raise(comms[k], tensors[k]), PEERS)
    killed_by_failpoint(cluster, victim)
    assert not check_same_fate([outcomes[k][0] for k in survivors], [tensors[k][0] for k in survivors], survivors)
    reduce_all([comms[k] for k in survivors], survivors)


def test_on_failure_raise_with_8_ops_in_flight(cluster: Cluster, comms: list[Any]) -> None:
    """A member that is not there when all the others have posted everything is lost: all eight end."""
    victim, survivors = 3, [0, 1, 2]
    cluster.pause(victim)
    tensors = [[contribution(k, 100_000) for _ in range(8)] for k in range(PEERS)]
    running = Background(lambda k: reduce_or_raise(comms[k], tensors[k]), survivors)

    def posted(k: int) -> bool:
        return any(member["name"] == f"m{k}" and member["ops"] == 8 for member in cluster.peer_status(k)["members"])

    wait_until(lambda: all(posted(k) for k in survivors), AT_ONCE, "the survivors' daemons have all 8 ops")
    cluster.kill(victim)
    outcomes = running.results()
    for op in range(8):
        assert not check_same_fate([mine[op] for mine in outcomes], [tensors[k][op] for k in survivors], survivors)
    reduce_all([comms[k] for k in survivors], survivors)


def test_world_too_small_then_a_joiner_makes_it_whole(cluster: Cluster) -> None:
    group = new_group()
    comms = join(cluster, [0, 1, 2], group=group, min_world=3)
    reduce_all(comms, [0, 1, 2])
    cluster.failpoint(2, "mid_op", "kill")
    tensors = [contribution(k, 8 * MIB) for k in range(3)]  # long enough to be in the middle of it
    outcomes = reduce_some(comms, tensors)
    for k in (0, 1):
        assert isinstance(outcomes[k].error, WorldTooSmall), repr(outcomes[k].error)
        assert untouched(tensors[k], k)
    for k in (0, 1):  # and again, without a hang
        with pytest.raises(WorldTooSmall):
            comms[k].all_reduce(tensors[k])
    waiting = Background(lambda k: comms[k].update_membership(), 2)
    joiner = Background(lambda k: cluster.connect(k, group=group, name="m3", start_world=3, min_world=3), [3])
    waiting.results()
    newcomer = joiner.results()[0]
    assert sorted(comms[0].members) == ["m0", "m1", "m3"]
    reduce_all([comms[0], comms[1], newcomer], [0, 1, 3])
    close_all([*comms, newcomer])


# ---- a joiner that cannot be reached -----------------------------------------------------------------


def test_unreachable_joiner_is_refused_and_the_members_go_on(cluster: Cluster) -> None:
    """Two that nobody can dial: each of them reaches the member that can be dialled, and not the other."""
    group = new_group()
    hidden, dead_end = (cluster.add_peer("--advertise=127.0.0.1:1") for _ in range(2))
    comms = join(cluster, [0, hidden], group=group)
    reduce_all(comms, [0, hidden])
    joiner = Background(
        lambda k: attempt(lambda: cluster.connect(k, group=group, name="m9", start_world=2, min_world=1)), [dead_end]
    )
    wait_until(lambda: "m9" in states(cluster, group) or any(joiner.finished), 10, "m9 asks to join")
    in_threads(lambda k: comms[k].update_membership(), 2, 30)
    error = joiner.results()[0].error
    assert isinstance(error, ConfigError), repr(error)
    assert "127.0.0.1:1" in str(error), "the reason names the address"
    assert sorted(comms[0].members) == ["m0", f"m{hidden}"]
    reduce_all(comms, [0, hidden])
    close_all(comms)
    cluster.kill(dead_end)
    cluster.kill(hidden)

"""DiLoCo over a real cluster: values of outer steps, losses, joiners, refusals, and what training comes to."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.tools import refused
from wancoll.chaos import Cluster, in_threads
from wancoll.client.communicator import Communicator

torch = pytest.importorskip("torch")
from wancoll.torch.training.diloco import DiLoCo, OuterStep  # noqa: E402 -- needs torch

NAMES = itertools.count(1)
PEERS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    torch.set_num_threads(1)
    with Cluster(PEERS, fork=True, peer_args=["--arena-bytes=268435456"]) as cluster:
        yield cluster


@pytest.fixture
def joined(cluster: Cluster) -> Iterator[Callable[..., list[Any]]]:
    """Makes the members of a new group, m0, m1, ...; they are closed after the test."""
    made: list[Any] = []

    def join(world: int, min_world: int = 1) -> list[Any]:
        options = {"group": f"g{next(NAMES)}", "start_world": world, "min_world": min_world}
        comms = in_threads(lambda k: cluster.connect(k, name=f"m{k}", **options), world, 30)
        made.extend(comms)
        return comms

    yield join
    for comm in made:
        comm.close()


def parameters(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]


def moved(mine: list[Any], member: int, step: int) -> None:
    """An inner step that can be computed again: each element goes a way of its own."""
    with torch.no_grad():
        for i, each in enumerate(mine):
            each.sub_(
                0.01 * (member + 1) * (i + 1) * torch.arange(1, each.numel() + 1).reshape(each.shape) / (step + 1)
            )


def in_turn(members: list[Any], call: Callable[[int], Any]) -> list[Any]:
    return in_threads(call, len(members), 60)


# ---- values ------------------------------------------------------------------------------------------


@pytest.mark.check  # the first use of DTensor costs seconds
def test_of_a_dtensor_this_ranks_part_is_taken(cluster: Cluster) -> None:
    """A DTensor has no memory of its own: it was read at address 0. A sum that is pending is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    from wancoll.torch import ElasticDataParallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.Linear(2, 2)
        whole = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (1,)))
        module.weight = torch.nn.Parameter(whole)
        assert DiLoCo(module.parameters(), every=2).outer[0].numel() == 6
        pending = DTensor.from_local(torch.ones(2, 2), whole.device_mesh, [Partial()])
        with cluster.connect(0, group=f"g{next(NAMES)}", name="m0", start_world=1) as comm:
            for call in (comm.all_reduce, comm.broadcast, lambda x: comm.all_reduce_many([x])):
                with refused("DTensor", "redistribute"):
                    call(pending)
                whole.to_local().fill_(3)
                call(whole)
                assert whole.to_local().tolist() == [[3, 3], [3, 3]]
            assert comm.all_reduce(whole).out is whole
            module.weight = torch.nn.Parameter(pending)
            with refused("ElasticDataParallel(module): a parameter", "DTensor", "redistribute"):
                ElasticDataParallel(module, comm)
    finally:
        torch.distributed.destroy_process_group()


def test_an_outer_step_is_nesterov_sgd_on_the_average_by_tokens(cluster: Cluster, joined: Any) -> None:
    comms = joined(3)
    tokens = [100.0, 300.0, 0.0]

    def train(k: int) -> tuple[Any, list[OuterStep], Any]:
        mine = parameters(k, (3, 5), (7,))  # each begins elsewhere: join() makes them one
        diloco = DiLoCo(mine, every=2, lr=0.5, momentum=0.8, codec="none")
        diloco.join(comms[k])
        begun = diloco.outer[0].clone()
        records = []
        for step in range(4):
            moved(mine, k, step)
            records += diloco.step(tokens[k])
        assert all(
            torch.equal(torch.cat([each.detach().reshape(-1) for each in mine]), outer) for outer in diloco.outer
        )
        return begun, records, diloco.outer[0].clone()

    found = in_turn(comms, train)
    begun, outer = found[0][0].double(), found[0][0].double()
    velocity = torch.zeros_like(outer)
    by_name = {comm.name: weight for comm, weight in zip(comms, tokens, strict=True)}
    for first in (0, 2):
        gradient = torch.zeros_like(outer)
        for k, weight in enumerate(tokens):
            mine = [torch.nn.Parameter(outer[:15].clone().reshape(3, 5)), torch.nn.Parameter(outer[15:].clone())]
            moved(mine, k, first)
            moved(mine, k, first + 1)
            local = torch.cat([each.detach().reshape(-1) for each in mine])
            gradient += (outer - local) * weight / sum(tokens)
        velocity = 0.8 * velocity + gradient
        outer = outer - 0.5 * (gradient + 0.8 * velocity)
    for start, records, end in found:
        assert torch.equal(start, found[0][0])
        assert torch.equal(end, found[0][2])
        assert torch.allclose(end.double(), outer, rtol=1e-5, atol=1e-6)
        assert not torch.equal(end.double(), begun)
        assert [(each.fragment, each.step, each.counted) for each in records] == [(0, 2, True), (0, 4, True)]
        assert all(each.weights == {k: 2 * v for k, v in by_name.items()} for each in records)
        assert all(each.tokens == 800.0 for each in records)
        assert all(set(each.receipt.contributors) == set(by_name) for each in records)


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16", "fp16", "top1.5%", "top5%-int8/top5%-int8"])
def test_with_a_codec_tokens_stay_what_they_are_and_replicas_the_same(
    cluster: Cluster, joined: Any, codec: Any
) -> None:
    comms = joined(2)

    def train(k: int) -> tuple[list[OuterStep], list[Any]]:
        mine = parameters(0, (40, 10), (300,), (11,))
        outer = "feedback" if "top" in codec else "nesterov"
        diloco = DiLoCo(mine, every=6, fragments=3, delay=2, mixing=0.5, codec=codec, outer=outer)
        diloco.join(comms[k])
        records = []
        for step in range(20):
            moved(mine, k, step)
            records += diloco.step(1000 + 24 * k)
        return records, [each.clone() for each in diloco.outer]

    (records, outer), (others, other) = in_turn(comms, train)
    assert len(records) == len(others) == 9  # three rounds of three
    for a, b in zip(outer, other, strict=True):
        assert torch.equal(a, b)
    for one, two in zip(records, others, strict=True):
        assert one.weights == two.weights
        steps = 2 * (one.fragment + 1) if one.step <= 6 else 6  # the first round is shorter for the first fragments
        exact = 4e-3 if codec == "bf16" or "top" in codec else 1e-3 if codec == "fp16" else 1e-6
        assert one.weights["m0"] == pytest.approx(1000 * steps, rel=exact)
        assert one.weights["m1"] == pytest.approx(1024 * steps, rel=exact)


def test_mixing_keeps_a_share_of_the_members_own(cluster: Cluster, joined: Any) -> None:
    (comm,) = joined(1)
    (mine,) = parameters(1, (4,))
    diloco = DiLoCo([mine], every=3, delay=1, mixing=0.25, lr=1.0, momentum=0.0, codec="none")
    diloco.join(comm)
    begun = mine.detach().clone()
    for change in (1.0, 1.0, 1.0, 8.0):
        with torch.no_grad():
            mine.add_(change)
        diloco.step()
    assert torch.allclose(diloco.outer[0], begun + 3.0)  # of the first three steps
    assert torch.allclose(mine.detach(), 0.25 * (begun + 11.0) + 0.75 * (begun + 3.0))


def test_a_checkpoint_goes_on_where_it_was(cluster: Cluster, joined: Any) -> None:
    (comm,) = joined(1)

    def run(diloco: DiLoCo, mine: list[Any], steps: range) -> None:
        diloco.join(comm)
        for step in steps:
            moved(mine, 0, step)
            diloco.step(3)

    straight, parts = parameters(2, (6,), (200,)), parameters(2, (6,), (200,))
    one = DiLoCo(straight, every=4, fragments=2, delay=1)
    run(one, straight, range(20))
    first = DiLoCo(parts, every=4, fragments=2, delay=1)
    run(first, parts, range(11))  # fragment 1 has been counted since step 8, fragment 0 begun at 10 and ended at 11
    kept, copies = first.state_dict(), [each.detach().clone() for each in parts]
    again = [torch.nn.Parameter(each) for each in copies]
    second = DiLoCo(again, every=4, fragments=2, delay=1)
    second.load_state_dict(kept)
    run(second, again, range(11, 20))
    assert (second.steps, second.outer_steps) == (one.steps, one.outer_steps)
    for a, b in zip((*one.outer, *straight), (*second.outer, *again), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_goes_on_with_another_codec(cluster: Cluster, joined: Any) -> None:
    (comm,) = joined(1)
    mine = parameters(2, (200,))
    one, other = DiLoCo(mine, every=1, codec="int8"), DiLoCo(mine, every=1, codec="top1.5%")
    one.join(comm)
    moved(mine, 0, 0)
    one.step()
    kept = one.state_dict()["feedback"]["diloco/0"]
    kept[0] = 5.0  # tokens that came too late
    other.load_state_dict(one.state_dict() | {"feedback": {"diloco/0": kept}})
    found = other.state_dict()["feedback"]["diloco/0"]
    assert found.size == 4096 + 200
    assert found[0] == 5.0
    assert (found[-200:] == kept[-200:]).all()
    other.join(comm)
    [step] = other.step()
    assert step.weights == {comm.name: 6.0}


@pytest.mark.parametrize("codec", ["top1.5%", "top1.5%/top1.5%"])
def test_with_a_hundred_times_fewer_bytes_the_loss_falls_as_with_int8(
    cluster: Cluster, joined: Any, codec: Any
) -> None:
    """A student of a teacher net, 10 inner steps a round; the residual in place of momentum."""

    def net(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = [(16, 128), (128, 128), (128, 8)]
        return torch.nn.Sequential(*(part for pair in layers for part in (torch.nn.Linear(*pair), torch.nn.Tanh())))[
            :-1
        ]

    teacher, nets = net(99), [net(0), net(0), net(0), net(0)]

    def loss(model: Any, draw: Any, count: int) -> Any:
        x = torch.randn(count, 16, generator=draw)
        return ((model(x) - teacher(x).detach()) ** 2).mean()

    def held_out(model: Any) -> float:
        with torch.no_grad():
            return float(loss(model, torch.Generator().manual_seed(5), 2000))

    def run(comms: list[Any], models: list[Any], options: dict[str, Any]) -> tuple[float, int]:
        def train(k: int) -> tuple[float, int]:
            inner = torch.optim.AdamW(models[k].parameters(), lr=2e-3)
            diloco = DiLoCo(models[k].parameters(), every=10, **options)
            diloco.join(comms[k])
            draw, sent = torch.Generator().manual_seed(1000 + k), 0
            while diloco.steps < 300:
                loss(models[k], draw, 64).backward()
                inner.step()
                inner.zero_grad()
                sent += sum(ended.receipt.bytes_sent for ended in diloco.step(64))
            return held_out(models[k]), sent

        found = in_turn(comms, train)
        assert found[0][0] == found[1][0]
        return found[0]

    begun = held_out(nets[0])
    int8, more = run(joined(2), nets[:2], {"codec": "int8"})
    sparse, sent = run(joined(2), nets[2:], {"codec": codec, "outer": "feedback", "lr": 1.0, "momentum": 0.95})
    print(f"loss {begun:.4f} at first, int8 {int8:.4f}, {codec} {sparse:.4f}, {more / sent:.0f} times fewer bytes")
    assert int8 < 0.1 * begun
    assert sparse < 0.1 * begun
    assert sparse < 6 * int8
    assert more / sent > 25


# ---- who comes and goes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "own", "ahead"),
    [(4, False, 0), (8, False, 2 + 3 + 3), (8, True, 0)],
    ids=["no-time", "ahead", "own-calls"],
)
def test_a_joiner_gets_parameters_momentum_and_step(
    cluster: Cluster, joined: Any, every: int, own: bool, ahead: int, monkeypatch: Any
) -> None:
    """It comes in the second round, where it can be asked for ahead: not where the callers have calls of their own."""
    comms = joined(2)
    asked = []
    ask = Communicator.update_membership
    monkeypatch.setattr(
        Communicator, "update_membership", lambda *args, **named: (asked.append(named), ask(*args, **named))[1]
    )
    comes = 2 * every - 1
    group = comms[0].group
    trained, came = threading.Event(), threading.Event()
    ends: dict[str, tuple[int, int, list[Any]]] = {}

    def go_on(diloco: DiLoCo, mine: list[Any], k: int, last: int) -> list[OuterStep]:
        records = []
        while diloco.steps < last:
            moved(mine, k, diloco.steps)
            if own:
                assert diloco._comm.all_reduce(np.ones(1)).out[0] == (2 if diloco.steps < comes else 3)
            records += diloco.step(2.0)
        state = [each.clone() for fragment in diloco._fragments for each in (fragment.outer, fragment.velocity)]
        ends[f"m{k}"] = diloco.steps, diloco.outer_steps, state
        return records

    def member(k: int) -> list[OuterStep]:
        mine = parameters(0, (30,), (500,))
        diloco = DiLoCo(mine, every=every, fragments=2, delay=1)
        diloco.join(comms[k])
        go_on(diloco, mine, k, comes - 2)
        trained.set()
        assert came.wait(30)
        return go_on(diloco, mine, k, 4 * every + 1)

    def joiner() -> list[OuterStep]:
        assert trained.wait(30)
        watcher = threading.Thread(target=lambda: _when_joining(cluster, group, came))
        watcher.start()
        comm = cluster.connect(2, group=group, name="late", start_world=2)
        mine = parameters(9, (30,), (500,))
        diloco = DiLoCo(mine, every=every, fragments=2, delay=1)
        diloco.join(comm)
        assert diloco.steps == comes
        with comm:
            return go_on(diloco, mine, 2, 4 * every + 1)

    records = in_threads(lambda k: member(k) if k < 2 else joiner(), 3, 60)
    assert ends["m0"][:2] == ends["m1"][:2] == ends["m2"][:2]
    for theirs in (ends["m1"], ends["m2"]):
        assert all(torch.equal(a, b) for a, b in zip(ends["m0"][2], theirs[2], strict=True))
    assert {tuple(sorted(each.weights)) for each in records[2]} == {("late", "m0", "m1")}
    first = next(each for each in records[2] if each.fragment == 1)
    assert (first.step, first.weights["late"]) == (comes + 1, pytest.approx(2.0))
    assert len([each for each in asked if each.get("async_op")]) == ahead


def _when_joining(cluster: Cluster, group: str, came: threading.Event) -> None:
    """Set *came* once the master has the newcomer's Join."""
    while not came.is_set():
        found = next((each for each in cluster.status().groups if each.name == group), None)
        if found is not None and any(each.state == "joining" for each in found.members):
            came.set()


def test_a_lost_member_costs_nobody_a_step(cluster: Cluster, joined: Any) -> None:
    """One of three leaves the group while an outer step is under way: the two others average what they have."""
    comms = joined(3)
    gone = threading.Event()

    def train(k: int) -> Any:
        mine = parameters(0, (1000,))
        diloco = DiLoCo(mine, every=3, delay=2, codec="none", lr=1.0, momentum=0.0)
        diloco.join(comms[k])
        begun = diloco.outer[0].clone()
        for step in range(3 if k < 2 else 2):
            moved(mine, k, step)
            diloco.step(1.0)
        if k == 2:  # the others have begun their outer step, or are about to
            comms[k].close()
            gone.set()
            return None
        assert gone.wait(30)
        alone = mine[0].detach().clone()
        moved(mine, k, 3)
        assert diloco.step(1.0) == []
        moved(mine, k, 4)
        (record,) = diloco.step(1.0)
        assert record.weights == {"m0": 3.0, "m1": 3.0}
        return begun, alone, diloco.outer[0]

    (begun, first, outer), (_, second, other), _ = in_turn(comms, train)
    assert torch.equal(outer, other)
    assert torch.allclose(outer, (first + second) / 2)
    assert not torch.equal(outer, begun)


def test_what_did_not_happen_counts_in_the_next_outer_step(cluster: Cluster, joined: Any) -> None:
    """The world gets too small in an outer step; what was trained is in the next one."""
    comms = joined(2, min_world=2)

    def train(k: int) -> Any:
        comm = comms[k]
        mine = parameters(0, (10,))
        diloco = DiLoCo(mine, every=2, codec="none", lr=1.0, momentum=0.0)
        diloco.join(comm)
        begun = diloco.outer[0].clone()
        moved(mine, k, 0)
        diloco.step(1.0)
        if k == 1:
            comm.close()
            comm = cluster.connect(1, group=comm.group, name="again", start_world=2, min_world=2)
            diloco.join(comm)  # as it was: nothing has happened meanwhile
        else:
            moved(mine, k, 1)
            with pytest.raises(wancoll.WorldTooSmall):
                diloco.step(1.0)
            comm.update_membership()
            diloco.join(comm)
        mine_then = mine[0].detach().clone()
        records = []
        while not records:
            records = diloco.step(0.0)
        comm.close()
        return begun, mine_then, records[0].weights, diloco.outer[0].clone()

    (begun, first, weights, outer), (_, second, others, other) = in_turn(comms, train)
    assert torch.equal(outer, other)
    assert weights == others == {"m0": 2.0, "again": 1.0}
    assert torch.allclose(outer, (2 * first + second) / 3)
    assert not torch.equal(first, begun)


def test_who_is_late_gets_the_same_and_counts_next_time(cluster: Cluster, joined: Any) -> None:
    comms = joined(2)
    ended = threading.Event()

    def train(k: int) -> Any:
        mine = parameters(0, (6,), (200,))
        diloco = DiLoCo(mine, every=4, fragments=2, lr=1.0, momentum=0.0, codec="none", grace=2.0)
        diloco.join(comms[k])
        begun = diloco.outer[0].clone()
        differences, records = [], []
        for step in range(8):
            moved(mine, k, step)
            if step in (1, 5):
                differences.append((begun if step == 1 else diloco.outer[0]) - mine[0].detach())
            if step == 1 and k == 1:
                assert ended.wait(30)  # the outer step has ended without this one
            now = diloco.step(1.0 + k)
            records += now
            if now and k == 0:
                ended.set()
        return begun, differences, records, [each.clone() for each in diloco.outer]

    (begun, of_one, records, outer), (_, of_late, others, other) = in_turn(comms, train)
    assert all(torch.equal(a, b) for a, b in zip(outer, other, strict=True))
    assert [each.weights for each in records] == [each.weights for each in others]
    assert records[0].weights == {"m0": 2.0, "m1": 0.0}
    assert [each.counted for each in records] == [True] * 4
    assert [each.counted for each in others] == [False, True, True, True]
    of_zero = [each for each in records if each.fragment == 0]
    assert of_zero[1].weights == {"m0": 4.0, "m1": 4.0 + 8.0}  # what it had sent too late goes with the next
    after = begun - of_one[0]
    assert torch.allclose(outer[0], after - (4 * of_one[1] + 4 * of_late[0] + 8 * of_late[1]) / 16, atol=1e-6)


# ---- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "DiLoCo(every=...)"),
        ({"fragments": 3}, "DiLoCo(fragments=...)"),
        ({"every": 10, "delay": 10}, "DiLoCo(delay=...)"),
        ({"mixing": 1.0}, "DiLoCo(mixing=...)"),
        ({"momentum": "much"}, "DiLoCo(momentum=...)"),
        ({"lr": 0}, "DiLoCo(lr=...)"),
        ({"codec": "int3"}, "DiLoCo"),
        ({"codec": "top0%"}, "DiLoCo"),
        ({"outer": "sgd"}, "DiLoCo(outer=...)"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(wancoll.ConfigError) as caught:
        DiLoCo(parameters(0, (3,), (3,)), **options)
    assert said in str(caught.value)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(wancoll.ConfigError, match="cannot be trained"):
        DiLoCo([torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)])
    diloco = DiLoCo(parameters(0, (3,)))
    with pytest.raises(wancoll.ConfigError, match="no group yet"):
        diloco.step()
    state = diloco.state_dict()
    with pytest.raises(wancoll.ConfigError, match="another model"):
        DiLoCo(parameters(0, (4,))).load_state_dict(state)


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(2, 3)), [("a", 1)]])
def test_what_is_no_parameter_is_refused(given: Any) -> None:
    with pytest.raises(wancoll.ConfigError, match=r"expected model\.parameters\(\)"):
        DiLoCo(given)


@pytest.mark.parametrize(
    "other", [{"lr": 0.1}, {"momentum": 0.5}, {"every": 3}, {"delay": 1}, {"mixing": 0.5}, {"outer": "feedback"}]
)
def test_members_of_other_settings_are_refused_by_name(cluster: Cluster, joined: Any, other: dict[str, Any]) -> None:
    comms = joined(2)

    def join(k: int) -> str:
        diloco = DiLoCo(parameters(0, (3,)), **({"every": 2} | (other if k else {})))
        try:
            diloco.join(comms[k])
        except wancoll.ConfigError as refused:
            with pytest.raises(wancoll.ConfigError, match="no group yet"):
                diloco.step()
            comms[k].close()
            return str(refused)
        ended = next(ended for _ in range(6) if (ended := diloco.step()))  # alone, once the other one has left
        assert [each.counted for each in ended] == [True]
        return ""

    said = in_turn(comms, join)
    ((name, value),) = other.items()
    right, wrong = sorted(said)  # whose settings count depends on the ranks
    assert right == "", said
    assert "DiLoCo of m" in wrong
    assert ("decays 1" if name == "outer" else f"{name} {value}") in wrong


@pytest.mark.parametrize("tokens", [-1, float("nan"), float("inf")])
def test_tokens_have_to_be_a_number(cluster: Cluster, joined: Any, tokens: float) -> None:
    (comm,) = joined(1)
    diloco = DiLoCo(parameters(0, (3,)))
    diloco.join(comm)
    with pytest.raises(wancoll.ConfigError, match="tokens cannot be used"):
        diloco.step(tokens)
    assert diloco.steps == 0


@pytest.mark.check  # the first use of torch.optim costs seconds
def test_the_pages_block_runs_as_it_stands(joined: Any, monkeypatch: Any, capsys: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "BATCH_TOKENS = " in each)
    comms, mine = joined(2), threading.local()
    monkeypatch.setattr(wancoll, "run", lambda train, start_world: train(mine.comm))

    def one(k: int) -> int:
        mine.comm = comms[k]
        names: dict[str, Any] = {}
        exec(block.replace("STEPS, BATCH_TOKENS = 1000", "STEPS, BATCH_TOKENS = 200"), names)
        assert names["diloco"].state_dict()["outer"]  # nothing is under way any more
        return int(names["diloco"].outer_steps)

    assert in_turn(comms, one) == [8, 8]
    assert "'m0': " in capsys.readouterr().out


# ---- what training comes to --------------------------------------------------------------------------


def corpus(nbytes: int) -> Any:
    """Real text that every Python has, as bytes."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text[:nbytes]), dtype=torch.uint8).long()


class Bytes(torch.nn.Module):
    """The next byte from the eight before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(128, 12)
        self.hidden = torch.nn.Linear(96, 64)
        self.out = torch.nn.Linear(64, 128)

    def forward(self, x: Any) -> Any:
        return self.out(torch.relu(self.hidden(self.embed(x).flatten(1))))


class Shards:
    """A batch for each (shard, step), and a held-out loss."""

    def __init__(self, shards: int, batch: int = 32) -> None:
        text = corpus(60_000).clamp(max=127)
        self.windows = text.unfold(0, 9, 1)
        self.held_out = self.windows[-4000:]
        self.shards, self.batch = shards, batch

    def loss(self, model: Any, windows: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])

    def train(self, model: Any, shard: int, step: int) -> Any:
        draw = torch.Generator().manual_seed(step * self.shards + shard)
        return self.loss(model, self.windows[torch.randint(len(self.windows) - 4000, (self.batch,), generator=draw)])

    def test(self, model: Any) -> float:
        with torch.no_grad():
            return float(self.loss(model, self.held_out))


@pytest.mark.check
def test_four_peers_one_killed_one_joins_and_the_loss_is_that_of_data_parallel(cluster: Cluster) -> None:
    """Processes' daemons are killed under real training: int8, error feedback, fragments under way."""
    shards, steps = Shards(4), 240
    start = Bytes()
    untrained = shards.test(start)
    plain = Bytes()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    for step in range(steps):
        sum(shards.train(plain, k, step) for k in range(4)).div(4).backward()
        optimizer.step()
        optimizer.zero_grad()
    goal = shards.test(plain)

    group = f"g{next(NAMES)}"
    extra = cluster.add_peer()
    meet, killed = threading.Event(), threading.Event()
    ends: dict[int, tuple[float, list[Any], list[OuterStep]]] = {}

    def train(k: int) -> None:
        if k == 4:
            assert killed.wait(60)
        with cluster.connect(k if k < 3 else extra if k == 3 else 3, group=group, name=f"m{k}", start_world=4) as comm:
            model = Bytes()
            inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
            diloco = DiLoCo(model.parameters(), every=20, fragments=2, delay=4, mixing=0.5)
            diloco.join(comm)
            records = []
            while diloco.steps < steps:
                shards.train(model, k % 4, diloco.steps).backward()
                inner.step()
                inner.zero_grad()
                if k == 0 and diloco.steps == 90:  # fragment 0 begins its outer step now, and m3 has not
                    assert meet.wait(60)
                    cluster.kill(extra)
                    killed.set()
                if k == 3 and diloco.steps == 89:
                    meet.set()
                    assert killed.wait(60)
                records += diloco.step(shards.batch)
            ends[k] = shards.test(model), [each.clone() for each in diloco.outer], records

    def one(k: int) -> None:
        if k == 3:
            with pytest.raises((wancoll.OutcomeUnknown, wancoll.PeerDaemonLost, wancoll.Evicted)):
                train(k)
        else:
            train(k)

    in_threads(one, 5, 120)
    assert set(ends) == {0, 1, 2, 4}
    losses = [ends[k][0] for k in sorted(ends)]
    for k in (1, 2, 4):
        assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[k][1], strict=True))
    worlds = [tuple(sorted(each.weights)) for each in ends[0][2]]
    assert [*dict.fromkeys(worlds)] == [("m0", "m1", "m2", "m3"), ("m0", "m1", "m2"), ("m0", "m1", "m2", "m4")]
    print(f"loss: untrained {untrained:.3f}, data parallel {goal:.3f}, DiLoCo {losses}")
    assert max(losses) < goal + 0.1 * (untrained - goal)

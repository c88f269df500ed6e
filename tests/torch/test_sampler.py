"""ElasticSampler: each sample once an epoch, whoever comes and goes; the same state on all; with torch's DataLoader."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wancoll.errors import ConfigError
from wancoll.torch import ElasticSampler


@dataclass
class Agreed:
    contributors: tuple[str, ...]


@dataclass
class Named:
    name: str


class Group:
    """Members as they would be: each has a sampler, and all see the same receipts."""

    def __init__(self, size: int, batch_size: int, **options: Any) -> None:
        self.make = lambda: ElasticSampler(size, batch_size, **options)
        self.samplers: dict[str, ElasticSampler] = {}
        self.used: Counter[tuple[int, int]] = Counter()  # (epoch, sample)
        self.weights: list[float] = []

    def join(self, *names: str) -> None:
        state = next(iter(self.samplers.values())).state_dict() if self.samplers else None
        for name in names:
            self.samplers[name] = self.make()
            if state is not None:
                self.samplers[name].load_state_dict(state)
        self.follow()

    def follow(self) -> None:
        for name, sampler in self.samplers.items():
            sampler.follow(Named(name), Agreed(tuple(self.samplers)))  # type: ignore[arg-type]

    def step(self, lost: tuple[str, ...] = ()) -> None:
        """All draw; those in *lost* die before the commit."""
        given = {}
        for name, sampler in self.samplers.items():
            draws = iter(sampler)
            batches = [next(draws) for _ in range(sampler.per_step)]
            assert all(batches)
            assert all(len(each) <= sampler.batch_size for each in batches)
            given[name] = [sample for each in batches for sample in each], sampler.weight, sampler.epoch
        for name in lost:
            del self.samplers[name]
        for name, sampler in self.samplers.items():
            samples, weight, epoch = given[name]
            real = round(weight * sampler.per_step * sampler.batch_size)
            # Fillers come where a cell is empty; cells without are the last ones.
            for sample in samples[:real] if real else []:
                self.used[epoch, sample] += 1
            sampler.commit(Agreed(tuple(self.samplers)))
        states = [sampler.state_dict() for sampler in self.samplers.values()]
        assert all(state == states[0] for state in states)

    @property
    def epoch(self) -> int:
        return next(iter(self.samplers.values())).epoch


@given(
    size=st.integers(1, 60), batch_size=st.integers(1, 5), members=st.integers(1, 4), per_step=st.integers(1, 3),
    chance=st.randoms(use_true_random=False), shuffle=st.booleans(),
)  # fmt: skip
def test_each_sample_is_used_once_an_epoch(
    size: int, batch_size: int, members: int, per_step: int, chance: random.Random, shuffle: bool
) -> None:
    group = Group(size, batch_size, per_step=per_step, shuffle=shuffle, seed=3)
    group.join(*(f"m{i}" for i in range(members)))
    born = members
    while group.epoch < 3:
        names = list(group.samplers)
        lost = tuple(chance.sample(names, chance.randrange(len(names)))) if chance.random() < 0.3 else ()
        group.step(lost)
        if chance.random() < 0.2 and len(group.samplers) < 5:
            group.join(f"m{born}")
            born += 1
        elif chance.random() < 0.1:
            group.follow()
    assert {key: n for key, n in group.used.items() if key[0] < 3} == {
        (epoch, sample): 1 for epoch in range(3) for sample in range(size)
    }


def test_the_order_is_shuffled_anew_in_each_epoch_and_the_same_for_a_seed() -> None:
    def order(seed: int) -> list[list[int]]:
        group = Group(40, 4, seed=seed)
        group.join("a")
        found: list[list[int]] = []
        sampler = group.samplers["a"]
        for _ in range(2):
            samples = []
            epoch = sampler.epoch
            while sampler.epoch == epoch:
                samples += next(iter(sampler))
                sampler.commit(Agreed(("a",)))
            found.append(samples)
        return found

    first, second = order(1)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert order(1) == [first, second]
    assert order(2) != [first, second]


def test_draws_ahead_are_those_of_later_steps() -> None:
    group = Group(24, 2, shuffle=False)
    group.join("a", "b")
    a, b = group.samplers.values()
    assert len(a) == 6
    ahead = iter(a)
    assert [next(ahead), next(ahead)] == [[0, 1], [4, 5]]
    assert next(iter(b)) == [2, 3]
    for each in (a, b):
        each.commit(Agreed(("a", "b")))
    assert next(ahead) == [8, 9]
    assert next(iter(b)) == [6, 7]
    a.commit(Agreed(("a",)))  # b was lost: what it had comes back
    assert list(ahead) == []  # what was drawn ahead is void
    assert list(a) == [[6, 7], *([k, k + 1] for k in range(8, 24, 2))]
    assert len(a) == 9


def test_the_last_step_is_shared_out_and_a_filler_counts_as_nothing() -> None:
    group = Group(5, 2, shuffle=False)
    group.join("a", "b", "c")
    assert [(next(iter(each)), each.weight) for each in group.samplers.values()] == [
        ([0, 1], 1.0), ([2, 3], 1.0), ([4], 0.5)
    ]  # fmt: skip
    group.step()
    group = Group(1, 2)
    group.join("a", "b")
    assert [(next(iter(each)), each.weight) for each in group.samplers.values()] == [([0], 0.5), ([0], 0.0)]


class Loader:
    """As a DataLoader that fetches *ahead* batches ahead."""

    def __init__(self, sampler: ElasticSampler, ahead: int) -> None:
        self.sampler, self.ahead = sampler, ahead

    def __iter__(self) -> Any:
        draws = iter(self.sampler)
        fetched: list[Any] = []
        for each in draws:
            fetched.append(each)
            if len(fetched) > self.ahead:
                yield fetched.pop(0)
        yield from fetched


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_batches_are_those_of_the_step_whatever_was_fetched_ahead(ahead: int) -> None:
    group = Group(20, 2, shuffle=False)
    group.join("a", "b")
    a = group.samplers["a"]
    found = []
    for number, batch in enumerate(a.batches(Loader(a, ahead))):
        found.append(batch)
        if number == 4:
            continue  # say, it was not finite: nothing is committed
        a.commit(Agreed(("a", "b") if number < 2 else ("a",)))
        if number == 6:
            a.follow(Named("a"), Agreed(("c", "a")))  # type: ignore[arg-type]
    assert found == [
        [0, 1], [4, 5], [8, 9], [10, 11], [12, 13], [12, 13], [14, 15], [18, 19],
        [16, 17],
    ]  # fmt: skip
    assert a.epoch == 1


@pytest.mark.check
@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_with_and_without_workers(workers: int) -> None:
    group = Group(40, 2, seed=5)
    group.join("a", "b")
    a = group.samplers["a"]
    loader: Any = torch.utils.data.DataLoader(range(40), batch_sampler=a, num_workers=workers)  # type: ignore[arg-type]
    seen: list[int] = []
    for number, batch in enumerate(a.batches(loader)):
        seen += batch.tolist()
        a.commit(Agreed(("a", "b") if number < 3 else ("a",)))
    b = {sample for samples in theirs(40, 2, 5, 3) for sample in samples}
    assert sorted([*seen, *b]) == list(range(40))


def theirs(size: int, batch_size: int, seed: int, steps: int) -> list[list[int]]:
    """What the second of two members has in the first steps."""
    group = Group(size, batch_size, seed=seed)
    group.join("a", "b")
    found = []
    for _ in range(steps):
        found.append(next(iter(group.samplers["b"])))
        group.samplers["b"].commit(Agreed(("a", "b")))
    return found


def test_batches_end_with_the_epoch_and_say_so_where_nothing_is_committed() -> None:
    group = Group(8, 2)
    group.join("a")
    a = group.samplers["a"]
    for epoch in range(3):
        seen = []
        for batch in a.batches(Loader(a, epoch)):
            seen += batch
            a.commit(Agreed(("a",)))
        assert sorted(seen) == list(range(8))
    with pytest.raises(ConfigError, match="no step was committed"):
        for _ in a.batches(a):
            pass


def test_a_batch_in_hand_when_samples_are_shared_out_anew_is_refused() -> None:
    a, roster = ElasticSampler(10, 2, shuffle=False), ("a", "b")
    a.follow(Named("a"), Agreed(roster))  # type: ignore[arg-type]
    seen, left = [], []
    for batch in a.batches(Loader(a, 1)):
        assert a.weight == 1
        if seen and not left:  # in the second step somebody joins
            roster = ("c", "a", "b")
            a.follow(Named("a"), Agreed(roster))  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"shared out anew.*before it.*leave it"):
                _ = a.weight
            left = batch
        else:
            seen.append(batch)
            a.commit(Agreed(roster))
    assert (left, seen, a.epoch) == ([4, 5], [[0, 1], [6, 7]], 1)
    a.follow(Named("a"), Agreed(roster))  # type: ignore[arg-type]
    assert a.weight == 1  # nothing is in hand


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size cannot be used"):
        ElasticSampler(3, 0)
    with pytest.raises(ConfigError, match=r"expected follow\(\) after sync_state; got a roster of nobody"):
        iter(ElasticSampler(3, 1))
    with pytest.raises(ConfigError, match=r"another sampler.*size 4.*size 3"):
        ElasticSampler(4, 1).load_state_dict(ElasticSampler(3, 1).state_dict())
    for wrong in (
        {"position": 4},
        {"position": -1},
        {"epoch": -1},
        {"returned": [3]},
        {"returned": "x"},
        {"epoch": 0.5},
    ):
        with pytest.raises(ConfigError, match="cannot be"):
            ElasticSampler(3, 1).load_state_dict({**ElasticSampler(3, 1).state_dict(), **wrong})

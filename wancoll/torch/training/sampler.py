"""ElasticSampler: which samples a member computes on, where members come and go; each sample once an epoch.

An epoch is a pool of samples in an order that all members know. A step takes the next per_step * members * batch_size
of it, a batch for each member of the roster: those whom the last operation that all agreed on named. The step's receipt
says whose batches were used; those of members that were lost go back to the front of the pool. Receipts are the same on
all members, so nothing needs to be told, and the state is an epoch, a position, and what came back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from wancoll.client.checks import whole, whole_number
from wancoll.client.communicator import Communicator
from wancoll.errors import ConfigError

T = TypeVar("T")

_TRIES = 5

_FIXED = ("size", "batch_size", "per_step", "seed", "shuffle")


class Agreed(Protocol):
    """A receipt of an operation of all members."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """Names of those who took part, in rank order."""


class ElasticSampler:
    """A batch sampler for a DataLoader, whose shards follow the membership.

    Give it to ElasticDataParallel(sampler=...), which tells it of each step, and to sync_state, with follow() after it.
    Use it through batches(loader), until the epoch has changed. What was given and not committed is given again: after
    follow() leave the batch that was given before it, since a step with it would be committed as another one. weight
    refuses it, and so does backward.

    The last step of an epoch has fewer samples. Who is left without gets one that counts as nothing: *weight* is 0.

    Args:
        size: how many samples there are: indices are 0 to size - 1.
        batch_size: samples of a batch of one member.
        per_step: batches of one member in a step, more than 1 with no_sync.
        seed: of the order.
        shuffle: another order in each epoch; False: ascending.

    Attributes:
        epoch: the epoch, from 0.

    Raises:
        ConfigError: an argument that cannot be used.
    """

    def __init__(self, size: int, batch_size: int, *, per_step: int = 1, seed: int = 0, shuffle: bool = True) -> None:
        for name, value in (("size", size), ("batch_size", batch_size), ("per_step", per_step), ("seed", seed)):
            whole_number("ElasticSampler", name, value, 0 if name == "seed" else 1)
        self.size, self.batch_size, self.per_step, self.seed, self.shuffle = size, batch_size, per_step, seed, shuffle
        self.epoch = 0
        self._position = 0  # in the epoch's order
        self._returned: list[int] = []  # what lost members had; the pool begins with it
        self._name = ""
        self._roster: tuple[str, ...] = ()
        self._order: tuple[int, NDArray[np.int64]] | None = None  # an epoch's
        self._in_hand = False  # a batch of batches() that is not committed
        self._void = False  # it was, at follow() or load_state_dict()
        self._run = 0  # counts up when what has been drawn ahead is void
        self._drawn = 0  # batches since the last commit
        self._commits = 0

    # ---- the membership ------------------------------------------------------------------------------

    def follow(self, comm: Communicator, receipt: Agreed) -> None:
        """From now on samples are shared out among those that took part in a sync_state, whose receipt that is."""
        self._name, self._roster = comm.name, receipt.contributors
        self._begin_anew()

    def commit(self, receipt: Agreed) -> None:
        """A step was taken by those that its receipt names. ElasticDataParallel calls it."""
        self._check_followed()
        cells = self._cells()
        lost = [
            sample
            for i, cell in enumerate(cells)
            if self._roster[i % len(self._roster)] not in receipt.contributors
            for sample in cell
        ]
        taken = sum(map(len, cells))
        self._position += max(0, taken - len(self._returned))
        self._returned = lost + self._returned[taken:]
        self._commits += 1
        self._in_hand = self._void = False
        self._drawn -= self.per_step
        if self._roster != receipt.contributors or self._drawn < 0:
            self._roster = receipt.contributors
            self._restart()
        if not self._left:
            self.epoch, self._position = self.epoch + 1, 0
            self._restart()

    # ---- samples -------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """The weight of this member's batches of the current step: 1 where they are full.

        Raises:
            ConfigError: follow() was not called, or after the batch in hand was given.
        """
        self._check_followed()
        if self._void:
            raise ConfigError(
                "the batch in hand is of samples that were shared out anew", who="ElasticSampler",
                expected="one that was given after follow()", got="one that was given before it",
                hint="leave it, and go on with the loop over batches()",
            )  # fmt: skip
        mine = self._cells()[self._rank :: len(self._roster)]
        return sum(map(len, mine)) / (self.per_step * self.batch_size)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches of this member, up to the end of the epoch.

        Where membership changes, what a loader with workers has fetched ahead is dropped, and it begins anew.

        Args:
            loader: iterates over this sampler, as DataLoader(dataset, batch_sampler=sampler) does.

        Raises:
            ConfigError: follow() was not called, or no step is committed to it.
        """
        self._check_followed()
        epoch, tries = self.epoch, 0
        while self.epoch == epoch:
            given, commits = 0, self._commits
            for batch in loader:
                run = self._run
                given += 1
                self._in_hand, self._void = True, False
                yield batch
                if self._commits != commits:
                    given, commits, tries = 0, self._commits, 0
                if self._run != run or given == self.per_step:
                    break
            if not given:
                continue
            tries += 1  # the step was not committed: its batches are given again
            if tries == _TRIES:
                raise ConfigError(
                    f"the same batch was given {_TRIES} times, and no step was committed", who="ElasticSampler.batches",
                    hint="ElasticDataParallel(..., sampler=sampler) commits in backward; skip_step() leaves it out",
                )  # fmt: skip

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of this member's batches, as if all members took part in each step."""
        self._check_followed()
        self._in_hand = self._void = False
        self._restart()
        return self._draws(self._run)

    def __len__(self) -> int:
        """How many batches this member has left in the epoch if nobody comes or goes."""
        self._check_followed()
        step = len(self._roster) * self.batch_size * self.per_step
        return -(-self._left // step) * self.per_step

    def _draws(self, run: int) -> Iterator[list[int]]:
        while self._run == run:
            ahead, j = divmod(self._drawn, self.per_step)
            cells = self._cells(ahead)
            if not any(cells):
                return
            mine = cells[j * len(self._roster) + self._rank]
            self._drawn += 1
            yield mine or cells[0][:1]

    def _cells(self, ahead: int = 0) -> list[list[int]]:
        """Samples of a step, *ahead* steps from now: of all members' first batches, then of their second ones, ..."""
        count = self.per_step * len(self._roster)
        full = count * self.batch_size
        pool = self._pool(ahead * full, full)
        each, more = divmod(len(pool), count)
        ends = [each * i + min(i, more) for i in range(count + 1)]
        return [pool[start:end] for start, end in itertools.pairwise(ends)]

    def _pool(self, start: int, most: int) -> list[int]:
        back = self._returned[start : start + most]
        at = self._position + max(0, start - len(self._returned))
        return [*back, *map(int, self._samples()[at : at + most - len(back)])]

    @property
    def _left(self) -> int:
        return len(self._returned) + self.size - self._position

    def _samples(self) -> NDArray[np.int64]:
        """The epoch's order."""
        if self._order is None or self._order[0] != self.epoch:
            chance = np.random.default_rng((self.seed, self.epoch))
            self._order = self.epoch, chance.permutation(self.size) if self.shuffle else np.arange(self.size)
        return self._order[1]

    @property
    def _rank(self) -> int:
        return self._roster.index(self._name)

    def _begin_anew(self) -> None:
        self._void = self._in_hand
        self._restart()

    def _restart(self) -> None:
        self._run += 1
        self._drawn = 0

    def _check_followed(self) -> None:
        if self._name not in self._roster:
            raise ConfigError(
                "nobody shares the samples out yet", who="ElasticSampler", expected="follow() after sync_state",
                got=f"a roster of {', '.join(self._roster) or 'nobody'}",
            )  # fmt: skip

    # ---- the state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on all members: for sync_state, and for checkpoints."""
        return {
            "epoch": self.epoch, "position": self._position, "returned": list(self._returned),
            **{name: getattr(self, name) for name in _FIXED},
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError: it is of another data set, or none.
        """
        mine = self.state_dict()
        if set(state) != set(mine) or any(state[name] != mine[name] for name in _FIXED):
            raise ConfigError(
                "the state is of another sampler", who="ElasticSampler.load_state_dict",
                expected=", ".join(f"{name} {mine[name]}" for name in _FIXED),
                got=", ".join(f"{name} {str(state.get(name))[:50]}" for name in _FIXED),
            )  # fmt: skip
        epoch, position, returned = state["epoch"], state["position"], state["returned"]
        if whole(epoch) < 0 or not 0 <= whole(position) <= self.size or not _samples(returned, self.size):
            raise ConfigError(
                "the state cannot be", who="ElasticSampler.load_state_dict",
                expected=f"an epoch, a position up to {self.size}, and samples that came back",
                got=f"{epoch!r}, {position!r}"[:200],
            )  # fmt: skip
        self.epoch, self._position, self._returned = epoch, position, list(returned)
        self._begin_anew()


def _samples(value: Any, size: int) -> bool:
    return isinstance(value, Sequence) and all(0 <= whole(each) < size for each in value)

"""run(): what brings a member back, what ends it, how long it waits. Against daemons that are played."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self, cast, get_type_hints

import pytest

import wancoll
from tests.client.tools import refused
from wancoll.client.connect import Connecting
from wancoll.errors import (
    CollectiveMismatch,
    ConfigError,
    Evicted,
    MasterUnreachable,
    OperationAborted,
    OutcomeUnknown,
    PeerDaemonLost,
    ProtocolError,
    WancollError,
    WorldTooSmall,
)

MODULE = "wancoll.client.run"


class Played:
    """A communicator; *made* counts them."""

    group, name, rank, world_size = "gang", "me", 0, 2

    def __init__(self) -> None:
        self.pending: tuple[Any, ...] = ()
        self.updates = 0
        self.closed = False

    def update_membership(self) -> None:
        self.updates += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


class World:
    """What connect() does, in order (then it works), and a clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.refusals: list[Exception] = []
        self.made: list[Played] = []
        self.options: list[dict[str, Any]] = []

    def connect(self, group: str, **options: Any) -> Played:
        self.options.append({"group": group, **options})
        if self.refusals:
            raise self.refusals.pop(0)
        self.made.append(Played())
        return self.made[-1]

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    wancoll.run  # noqa: B018 - loads the module
    module = sys.modules[MODULE]
    monkeypatch.setattr(module, "connect", world.connect)
    monkeypatch.setattr(module, "time", world)
    monkeypatch.setattr(module.random, "uniform", lambda low, high: high)
    yield world
    assert all(one.closed for one in world.made)


def training(*outcomes: Any) -> Callable[[Any], Any]:
    """A train() that raises or returns these, one for each call."""
    left = list(outcomes)

    def train(comm: Any) -> Any:
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return train


def test_it_returns_what_train_returns(world: World) -> None:
    assert wancoll.run(training("done"), "gang", start_world=4, min_world=2, name="me") == "done"
    assert world.options == [{"group": "gang", "start_world": 4, "min_world": 2, "name": "me"}]
    assert world.slept == []


@pytest.mark.parametrize("kind", [Evicted, MasterUnreachable, OutcomeUnknown, PeerDaemonLost])
def test_what_brings_it_back(world: World, kind: type[WancollError], caplog: pytest.LogCaptureFixture) -> None:
    assert wancoll.run(training(kind("gone"), kind("gone"), 7), "gang") == 7
    assert len(world.made) == 3
    assert world.slept == [0.5, 0.5]  # each time it had a place again
    assert f"group 'gang': {kind.__name__}: gone; connecting again in 0.5 s" in caplog.text
    assert "group 'gang': back as 'me', rank 0 of 2" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        CollectiveMismatch("x"),
        OperationAborted("x"),
        ProtocolError("x"),
        ConfigError("x"),
        wancoll.ArenaFull("x"),
        wancoll.TimeoutError("x"),
        ValueError("x"),
        KeyboardInterrupt(),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_what_ends_it(world: World, bad: BaseException) -> None:
    with pytest.raises(type(bad)):
        wancoll.run(training(bad), "gang")
    assert len(world.made) == 1
    assert world.slept == []


def test_the_same_again_is_said_in_short(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.refusals = [PeerDaemonLost("no daemon")] * 3 + [MasterUnreachable("no master")]
    assert wancoll.run(training(MasterUnreachable("no master"), "done"), "gang") == "done"
    told = [record.getMessage().partition("; connecting")[0] for record in caplog.records if "again in" in record.msg]
    assert told == [
        "group 'gang': PeerDaemonLost: no daemon",
        "group 'gang': PeerDaemonLost, as before",
        "group 'gang': PeerDaemonLost, as before",
        "group 'gang': MasterUnreachable: no master",
        "group 'gang': MasterUnreachable: no master",
    ]


def test_too_small_a_world_waits_for_joiners(world: World) -> None:
    """The same communicator: whoever comes joins what is left of the group."""
    assert wancoll.run(training(WorldTooSmall("x"), WorldTooSmall("x"), "done")) == "done"
    assert [one.updates for one in world.made] == [2]


def test_pauses_grow_up_to_a_bound_while_there_is_no_place(world: World) -> None:
    world.refusals = [PeerDaemonLost("not there")] * 4 + [MasterUnreachable("gone")] * 3
    assert wancoll.run(training(Evicted("x"), "done")) == "done"
    assert world.slept == [0.5, 1, 2, 4, 8, 15, 15, 0.5]


def test_patience_ends(world: World) -> None:
    world.refusals = [PeerDaemonLost(f"try {number}") for number in range(100)]
    with refused("try 4", error=PeerDaemonLost):  # after 0.5, 1.5, 3.5 and 7.5 s
        wancoll.run(training(), patience=10)


def test_patience_bounds_the_wait_for_the_group_too(world: World) -> None:
    """Each connect has what is left of it as its timeout, or its own if that is shorter."""
    world.refusals = [MasterUnreachable("x"), wancoll.TimeoutError("did not take this member in")]
    with refused("did not take this member in", error=wancoll.TimeoutError):
        wancoll.run(training(), "gang", patience=10)
    assert [options["timeout"] for options in world.options] == [10.0, 9.5]
    world.options.clear()
    assert wancoll.run(training(Evicted("x"), "done"), patience=10, timeout=9.8) == "done"
    assert [options["timeout"] for options in world.options] == [9.8, 9.5]
    world.options.clear()
    assert wancoll.run(training("done"), patience=10, timeout=None) == "done"
    assert wancoll.run(training("done"), patience=float("inf")) == "done"
    assert [options.get("timeout") for options in world.options] == [10.0, float("inf")]


def no_argument() -> None: ...


def two_arguments(comm: Any, state: Any) -> None: ...


async def asynchronous(comm: Any) -> None: ...


def generator(comm: Any) -> Iterator[int]:
    yield 1


class Trainer:
    def __call__(self, comm: Any) -> str:
        return "done"

    def step(self, comm: Any, rate: float = 0.1) -> str:
        return "done"


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (None, ("run(train=...): train cannot be called", "a function that takes the communicator", "got None")),
        ("gang", ("train cannot be called", "got 'gang'", "run(train, group)")),
        (training("done")(None), ("train cannot be called", "run(train, group)")),
        (no_argument, ("train cannot be called with a communicator", "got no_argument()")),
        (two_arguments, ("train cannot be called with a communicator", "got two_arguments(comm, state)", "partial")),
        (asynchronous, ("train would not run when it is called", "asynchronous")),
        (generator, ("train would not run when it is called", "generator")),
    ],
)
def test_a_train_that_cannot_be_called_is_refused_before_it_joins(
    world: World, train: Any, words: tuple[str, ...]
) -> None:
    with refused(*words):
        wancoll.run(train)
    assert world.options == []


@pytest.mark.parametrize("train", [Trainer(), Trainer().step, lambda *comms: "done", str.upper, print])
def test_whatever_takes_a_communicator_is_called(world: World, train: Any) -> None:
    with contextlib.suppress(TypeError):  # of str.upper, which is no train(), but can be called
        wancoll.run(train)
    assert len(world.made) == 1


@pytest.mark.parametrize("patience", [-1, 0, "10", float("nan"), True])
def test_a_patience_that_cannot_be_used(world: World, patience: Any) -> None:
    with refused("run(patience=...): patience cannot be used", "seconds, above 0, or None", f"got {patience!r}"):
        wancoll.run(training(), patience=patience)
    assert world.options == []


def test_patience_counts_from_the_loss(world: World) -> None:
    def train(comm: Any) -> str:
        world.now += 1000
        return str(training_outcomes(comm))

    training_outcomes = training(Evicted("x"), Evicted("y"), "done")
    assert wancoll.run(train, patience=10) == "done"


def test_its_own_older_self_may_hold_its_name_for_a_while(world: World) -> None:
    """The master has yet to notice that the member is gone. At the start a refusal is one."""
    taken = ConfigError("the master refused the join: that name is taken")
    world.refusals = [taken]
    with pytest.raises(ConfigError):
        wancoll.run(training())
    first = iter((Evicted("x"), "done"))

    def train(comm: Any) -> str:
        world.refusals = [taken] * 3
        outcome = next(first)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert wancoll.run(train) == "done"
    first = iter((Evicted("x"), "done"))
    world.refusals = []

    def haunted(comm: Any) -> str:
        world.refusals = [taken] * 100
        raise next(first)  # type: ignore[misc]

    with pytest.raises(ConfigError, match="taken"):
        wancoll.run(haunted)


def test_types_of_options_are_those_of_connect() -> None:
    hints = get_type_hints(cast(Any, wancoll.connect))
    del hints["return"], hints["group"]
    assert get_type_hints(Connecting) == hints

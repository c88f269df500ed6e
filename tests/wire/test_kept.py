"""What was said over a connection that breaks comes once and in order; and no more is kept than may be."""

from __future__ import annotations

import random

import pytest

from wancoll.limits import DEFAULT
from wancoll.wire import messages as m
from wancoll.wire.kept import Kept, counts


@pytest.mark.parametrize("seed", range(20))
def test_wherever_it_breaks_all_comes_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    kept: Kept[int] = Kept()
    heard: list[int] = []
    on_the_way: list[int] = []
    for frame in range(500):
        kept.add(frame, 1)
        on_the_way.append(frame)
        if rng.random() < 0.5:  # some of it arrives
            count = rng.randint(0, len(on_the_way))
            heard += on_the_way[:count]
            del on_the_way[:count]
        if rng.random() < 0.2:  # a heartbeat says how much, maybe late
            kept.confirmed(rng.randint(0, len(heard)))
        if rng.random() < 0.1:  # it breaks: what is on the way is lost, and said again
            again = kept.again(len(heard))
            assert again is not None
            on_the_way = again
    assert heard + on_the_way == list(range(500))


def test_what_cannot_be_known_is_not_said_again() -> None:
    kept: Kept[str] = Kept()
    for frame in "abc":
        kept.add(frame, 1)
    assert kept.again(4) is None, "more than was said"
    assert kept.again(2) == ["c"]
    assert kept.again(1) is None, "it had more already"


@pytest.mark.parametrize(
    ("frames", "nbytes", "room"),
    [
        (DEFAULT.unconfirmed_messages, 1, DEFAULT.unconfirmed_bytes),
        (64, DEFAULT.unconfirmed_bytes // 64, None),
        (4, 25, 100),
    ],
    ids=["messages", "bytes", "its share of the bytes"],
)
def test_no_more_is_kept_than_may_be(frames: int, nbytes: int, room: int | None) -> None:
    kept: Kept[int] = Kept()
    rooms = {} if room is None else {"room": room}
    for frame in range(frames):
        kept.add(frame, nbytes, **rooms)
    assert not kept.lost
    kept.add(frames, nbytes, **rooms)
    assert kept.lost
    assert kept.again(0) is None
    kept.add(0, nbytes)
    assert kept.lost, "one that was lost stays so"


def test_what_was_confirmed_takes_no_room() -> None:
    kept: Kept[int] = Kept()
    for frame in range(100):
        kept.add(frame, 25, 100)
        kept.confirmed(frame)
    assert not kept.lost
    assert kept.again(99) == [99]


def test_what_says_that_one_is_there_belongs_to_one_connection() -> None:
    """But not what ends a report, and its answer."""
    assert [counts(m.Heartbeat(number)) for number in (0, 1)] == [True, False]
    assert [counts(m.Pong(number, term=1)) for number in (0, 1)] == [True, False]
    assert not counts(m.Bye("why"))
    assert counts(m.Commit("g", 1, 1, 1))

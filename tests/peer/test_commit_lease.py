"""C8's clock: it counts from when a word was sent that a master has answered, not from when the answer was read."""

from __future__ import annotations

import pytest

from wancoll.peer.core.liveness.commit_lease import CommitLease


def commit_lease() -> CommitLease:
    """Welcomed at 1; heartbeats 1 to 3 were sent at 10, 20, 30."""
    one = CommitLease(0.0)
    one.said_hello(1.0)
    one.answered()
    for number in (1, 2, 3):
        one.said(number, 10.0 * number)
    return one


@pytest.mark.parametrize(("answered", "unheard"), [(0, 129.0), (1, 120.0), (2, 110.0), (3, 100.0)])
def test_an_answer_counts_from_when_its_question_was_sent(answered: int, unheard: float) -> None:
    one = commit_lease()
    one.answered(answered)
    assert one.unheard(130.0) == unheard


def test_an_older_answer_that_comes_later_takes_nothing_back() -> None:
    one = commit_lease()
    one.answered(3)
    one.answered(1)
    assert one.unheard(130.0) == 100.0


def test_what_was_said_on_an_older_connection_is_never_answered() -> None:
    one = commit_lease()
    one.said_hello(50.0)
    assert one.unheard(130.0) == 129.0
    one.said(1, 60.0)
    one.answered()
    assert one.unheard(130.0) == 80.0
    one.answered(3)
    assert one.unheard(130.0) == 70.0


def test_it_is_over_when_the_master_may_free_the_name() -> None:
    one = commit_lease()
    assert not one.is_over(630.9, 30.0, 600.0)
    assert one.is_over(631.0, 30.0, 600.0)
    assert not one.is_over(1e9, 30.0, float("inf"))

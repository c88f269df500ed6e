"""The schedule of fragments: who begins and ends when, over whole rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wancoll.torch.training.fragments import Act, cut, most_fragments, turn

B, E, K, A = Act.begin, Act.end, Act.ask, Act.admit


def told(steps: range, every: int, fragments: int, delay: int) -> dict[int, list[tuple[Act, int]]]:
    """What happens, by step; steps at which nothing does are left out."""
    return {step: acts for step in steps if (acts := turn(step, every, fragments, delay))}


def test_plain_diloco_begins_and_ends_where_a_round_ends() -> None:
    assert told(range(1, 9), 4, 1, 0) == {4: [(B, 0), (E, 0), (A, -1)], 8: [(B, 0), (E, 0), (A, -1)]}


def test_fragments_take_turns_and_end_after_the_delay() -> None:
    assert told(range(1, 14), 6, 3, 1) == {
        2: [(B, 0)],
        3: [(E, 0)],
        4: [(B, 1)],
        5: [(E, 1), (A, -1)],
        6: [(B, 2)],
        7: [(E, 2)],
        8: [(B, 0)],
        9: [(E, 0)],
        10: [(B, 1)],
        11: [(E, 1), (A, -1)],
        12: [(B, 2)],
        13: [(E, 2)],
    }


def test_what_is_under_way_where_members_join_ends_there() -> None:
    # Delay 5 of 6: fragment 0 begins at 3 and would end at 8; nothing may be under way when members join.
    assert told(range(1, 13), 6, 2, 5) == {
        3: [(B, 0)],
        5: [(E, 0), (A, -1)],
        6: [(B, 1)],
        9: [(B, 0)],
        11: [(E, 1), (E, 0), (A, -1)],
        12: [(B, 1)],
    }


def test_it_is_asked_who_waits_once_nothing_is_under_way_and_at_most_a_delay_ahead() -> None:
    assert told(range(9, 17), 8, 2, 1) == {
        9: [(E, 1)],
        12: [(B, 0)],
        13: [(E, 0)],
        14: [(K, -1)],
        15: [(A, -1)],
        16: [(B, 1)],
    }
    assert told(range(9, 17), 8, 2, 2) == {
        10: [(E, 1)],
        12: [(B, 0)],
        14: [(E, 0), (K, -1)],
        15: [(A, -1)],
        16: [(B, 1)],
    }


@given(st.integers(1, 40), st.data())
def test_each_fragment_has_one_step_a_round_and_never_two_at_once(every: int, data: st.DataObject) -> None:
    delay = data.draw(st.integers(0, every - 1))
    fragments = data.draw(st.integers(1, most_fragments(every, delay)))
    under_way: dict[int, int] = {}
    begun = dict.fromkeys(range(fragments), 0)
    admitted, asked = 0, 0
    for step in range(1, 4 * every + 1):
        acts = turn(step, every, fragments, delay)
        admits = (A, -1) in acts
        assert not asked or acts in ([], [(A, -1)])  # nothing comes between
        for act, p in acts:
            if act is A:
                assert not under_way
                assert acts[-1] == (A, -1)
                assert not asked or 0 < step - asked <= delay
                admitted, asked = admitted + 1, 0
            elif act is K:
                assert not under_way
                assert acts[-1] == (K, -1)
                asked = step
            elif act is B:
                assert p not in under_way
                under_way[p], begun[p] = step, begun[p] + 1
            else:
                lasted = step - under_way.pop(p)
                assert lasted == delay or (lasted < delay and admits)
        if step % every == 0:
            assert begun == dict.fromkeys(range(fragments), step // every)
            assert admitted == step // every
        assert all(step - at < max(1, delay) for at in under_way.values())


def test_cut_keeps_neighbours_together_and_balances() -> None:
    assert cut([10, 10, 10, 10], 2) == [range(2), range(2, 4)]
    assert cut([100, 1, 1, 1], 2) == [range(1), range(1, 4)]
    assert cut([5], 1) == [range(1)]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_cut_gives_each_fragment_a_parameter_and_each_parameter_a_fragment(
    sizes: list[int], data: st.DataObject
) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    found = cut(sizes, fragments)
    assert len(found) == fragments
    assert all(len(each) > 0 for each in found)
    assert [i for each in found for i in each] == list(range(len(sizes)))


@pytest.mark.parametrize("fragments", [1, 2, 5])
def test_equal_parameters_make_equal_fragments(fragments: int) -> None:
    assert {len(each) for each in cut([7] * 10, fragments)} == {10 // fragments}

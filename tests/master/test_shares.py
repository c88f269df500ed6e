"""Shares of a direct all_reduce: never worse than what any other shares take, and whole numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wancoll_master.plan.shares import UNIT, busiest, share_out
from wancoll_master.plan.topology import MATERIAL

SPEEDS = st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=40)


def least(speeds: list[float]) -> float:
    """Seconds for each byte that no shares can beat: the tensor once, and by the sum of all that goes."""
    return max(1 / min(speeds), 2 * (len(speeds) - 1) / sum(speeds))


@given(SPEEDS)
def test_no_shares_are_faster(speeds: list[float]) -> None:
    shares = share_out(speeds, gain=1.0)
    if len(speeds) < 3:
        assert shares == []
        return
    even = busiest([], speeds)
    if shares:
        assert (len(shares), max(shares)) == (len(speeds), UNIT)
        assert all(0 <= share <= UNIT for share in shares)
        assert least(speeds) * (1 - 1e-9) <= busiest(shares, speeds) <= min(even, least(speeds) * (1 + 2 / UNIT))
    else:
        assert even <= least(speeds) * (1 + 2 / UNIT)


@given(SPEEDS)
def test_even_shares_stay_where_others_gain_little(speeds: list[float]) -> None:
    shares = share_out(speeds)
    assert (shares != []) == (
        len(speeds) > 2 and busiest([], speeds) >= MATERIAL * busiest(share_out(speeds, gain=1.0), speeds)
    )


def test_shares_of_known_speeds() -> None:
    assert share_out([110, 110, 110, 40]) == [1024, 1024, 1024, 0]
    # 6 / 380 of a second: 110 / 380 of the tensor each, and 50 / 380
    assert share_out([100, 100, 100, 80]) == [1024, 1024, 1024, 465]
    assert share_out([500, 100, 50, 50]) == [1024, 0, 0, 0]
    assert share_out([110] * 4) == share_out([110, 40]) == share_out([1]) == []
    assert busiest([1024, 1024, 1024, 0], [110, 110, 110, 40]) == 1 / 40
    assert busiest([], [110, 110, 110, 40]) == 1.5 / 40

"""What a step of training takes on paper: the textbook's figures, and each way's formula."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest

from wancoll.schedule.cost import LinkCost, lower_bound, seconds
from wancoll.schedule.training import (
    OUTER_BYTES,
    PRECISIONS,
    Estimate,
    Job,
    all_reduce_twice,
    bubble,
    estimates,
    order,
)

JOB = Job(
    parameters=1_000_000,
    layers=8,
    hidden=64,
    sequence=32,
    micro_batches=8,
    micro_batch=2,
    inner_steps=50,
    precision=PRECISIONS["mixed"],
    flops=1e9,
)
LINK = LinkCost(1e-3, 1e-6)
EDGE = 32 * 2 * 64 * 2  # bytes of a micro-batch between two layers
STEP = 6 * 1_000_000 * 8 * 2 * 32 / 8 / 1e9  # seconds of computing on each of eight


def by_name(members: int = 8, job: Job = JOB, **options: tuple[int, int, int]) -> dict[str, Estimate]:
    found = estimates(job, members, LINK, **options)
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


# ---- the textbook's figures ----------------------------------------------------------------------------


def test_half_a_million_parameters_on_four_workers() -> None:
    """float32 over links of 2 GB/s with 50 us a message: 1.8 ms, and 2.3 ms by the rule of thumb."""
    link, nbytes = LinkCost(50e-6, 1 / 2e9), 500_000 * 4
    assert seconds("ring", nbytes, 4, link) == pytest.approx(1.8e-3)
    assert all_reduce_twice(nbytes, 4, link) == pytest.approx(2.3e-3)


def test_eight_peers_and_a_gigabyte() -> None:
    assert lower_bound("all_reduce", 1e9, 8) == 1.75e9
    assert lower_bound("reduce_scatter", 1e9, 8) == lower_bound("all_gather", 1e9, 8) == 0.875e9


def test_seven_billion_parameters_near_and_far() -> None:
    """NVLink's 900 GB/s against 100 Gbit/s."""
    job = dataclasses.replace(JOB, parameters=7_000_000_000)
    assert job.gradients == 14e9
    assert seconds("ring", job.gradients, 8, LinkCost(1e-6, 1 / 900e9)) == pytest.approx(0.0272, rel=0.01)
    assert all_reduce_twice(job.gradients, 8, LinkCost(1e-6, 1 / 900e9)) == pytest.approx(0.0311, rel=0.01)
    assert seconds("ring", job.gradients, 8, LinkCost(50e-6, 8 / 100e9)) > 1


def test_memory_of_seven_and_a_half_billion_parameters_on_64_devices() -> None:
    """The figures of the ZeRO paper, figure 1: 120, 31.4, 16.6 and 1.9 GB."""
    job = dataclasses.replace(JOB, parameters=7_500_000_000)
    found = {one.name: one.state for one in estimates(job, 64, LINK)}
    assert [round(found[name] / 1e9, 1) for name in ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")] == [120, 31.4, 16.6, 1.9]


def test_bytes_of_a_parameter() -> None:
    assert {name: one.total for name, one in PRECISIONS.items()} == {"mixed": 16, "half-moments": 12, "single": 16}


@pytest.mark.parametrize(
    ("stages", "micro_batches", "part"), [(4, 4, Fraction(3, 7)), (4, 12, Fraction(1, 5)), (1, 3, 0)]
)
def test_bubble(stages: int, micro_batches: int, part: float) -> None:
    assert bubble(stages, micro_batches) == pytest.approx(float(part))


# ---- each way ------------------------------------------------------------------------------------------


def test_zero_with_one_micro_batch_each_sends_as_the_paper_says() -> None:
    """Stages 1 and 2 as much as data parallel, stage 3 half as much again."""
    found = by_name()
    assert found["DP"].sent == 2 * 7 / 8 * 2e6
    assert found["DP"].communicating == pytest.approx(14 * 1e-3 + 2 * 7 / 8 * 2e6 * 1e-6)
    for name, times in (("ZeRO-1", 1), ("ZeRO-2", 1), ("ZeRO-3", 1.5)):
        assert found[name].sent == pytest.approx(times * found["DP"].sent)
        assert found[name].communicating == pytest.approx(times * found["DP"].communicating)


def test_who_keeps_shards_pays_for_each_micro_batch() -> None:
    found = by_name(job=dataclasses.replace(JOB, micro_batches=32))
    half = 7 / 8 * 2e6
    assert found["DP"].sent == found["ZeRO-1"].sent == 2 * half
    assert found["ZeRO-2"].sent == (4 + 1) * half
    assert found["ZeRO-3"].sent == (4 + 8) * half


def test_tensor_and_sequence_parallel() -> None:
    found = by_name()
    tp, sp = found["TP"], found["TP+SP"]
    # Four all-reduces of a micro-batch's activations in each layer.
    assert tp.sent == sp.sent == 4 * 8 * 8 * (2 * 7 / 8 * EDGE)
    assert tp.communicating == sp.communicating == pytest.approx(4 * 8 * 8 * (14e-3 + 2 * 7 / 8 * EDGE * 1e-6))
    assert tp.state == sp.state == 16e6 / 8
    # 10 + 24/t and 34/t bytes of each token and unit, EDGE is two of them.
    assert tp.activations == 8 * EDGE / 2 * (10 + 24 / 8)
    assert sp.activations == 8 * EDGE / 2 * 34 / 8
    assert found["DP"].activations == 8 * EDGE / 2 * 34


def test_a_pipeline_waits_and_its_inner_stages_talk_both_ways() -> None:
    pp = by_name()["PP"]
    assert pp.computing == pytest.approx(STEP)
    assert pp.bubble == pytest.approx(bubble(8, 8))
    assert pp.idle == pytest.approx(STEP * 7 / 8)
    assert pp.sent == 2 * 8 * EDGE
    assert pp.communicating == pytest.approx(16 * (1e-3 + EDGE * 1e-6))
    assert pp.activations == JOB.layer() * 8  # one layer, eight micro-batches under way
    assert by_name(2)["PP"].sent == 8 * EDGE
    assert "PP" not in by_name(16)  # of eight layers


def test_three_axes_add_up() -> None:
    one = by_name(split=(2, 2, 2))["3D"]
    assert one.split == (2, 2, 2)
    assert one.state == 16e6 / 4
    own, layers = 4, 4
    tensor, data, stages = 4 * layers * own * EDGE, 2e6 / 4, own * EDGE / 2
    assert one.sent == tensor + data + stages
    assert one.activations == layers * EDGE / 2 * 34 / 2 * 2
    assert one.bubble == pytest.approx(bubble(2, 4))
    assert by_name()["3D"].split == (2, 2, 2)  # the only one with three
    assert "3D" not in by_name(7)
    assert sorted(by_name(6)["3D"].split) == [1, 2, 3]
    assert by_name(12)["3D"].step == min(
        by_name(12, split=each)["3D"].step for each in ((2, 2, 3), (2, 3, 2), (3, 2, 2))
    )


def test_diloco_talks_once_in_h_steps() -> None:
    found = by_name()
    assert found["DiLoCo"].sent == pytest.approx(found["DP"].sent / 50)
    assert found["DiLoCo"].communicating == pytest.approx(found["DP"].communicating / 50)
    assert found["DiLoCo"].state == (16 + OUTER_BYTES) * 1e6


def test_all_compute_the_same_batch() -> None:
    assert {round(one.computing, 9) for one in by_name().values()} == {round(STEP, 9)}
    alone = by_name(1)
    assert {one.sent for one in alone.values()} == {0}
    assert {one.share for one in alone.values()} == {0}


def test_share_is_of_the_whole_step() -> None:
    pp = by_name()["PP"]
    assert pp.share == pytest.approx(pp.communicating / (pp.computing + pp.idle + pp.communicating))


# ---- what to try ---------------------------------------------------------------------------------------


def way(name: str, memory: float, step: float) -> Estimate:
    return Estimate(name, (1, 1, 1), memory, 0.0, 0.0, step, 0.0, 0.0)


def test_what_fits_in_the_order_of_the_rows_and_what_is_slow_comes_last() -> None:
    found = [way("a", 10, 2.1), way("b", 5, 1.9), way("c", 5, 1.0), way("d", 11, 0.1), way("e", 1, 3.0)]
    assert [one.name for one in order(found, 10)] == ["b", "c", "a", "e"]
    assert [one.name for one in order(found, 1)] == ["e"]
    assert order(found, 0) == []


def test_the_recipe_of_the_textbooks() -> None:
    """Data parallel first, ZeRO by stages where it does not fit, then the rest; DiLoCo where the link is slow."""
    slow, fast = LinkCost(40e-3, 8 / 200e6), LinkCost(1e-6, 1 / 900e9)
    job = dataclasses.replace(JOB, flops=1e8)
    assert order(estimates(dataclasses.replace(job, flops=1e10), 8, slow), 1e9)[0].name == "DiLoCo"
    names = [one.name for one in order(estimates(job, 8, fast), 1e9)]
    assert names == ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "TP", "TP+SP", "PP", "3D", "DiLoCo"]
    big = dataclasses.replace(job, parameters=10**9, flops=1e12)
    for memory, first in ((17e9, "DP"), (8e9, "ZeRO-1"), (4.5e9, "ZeRO-2"), (2.2e9, "ZeRO-3")):
        assert order(estimates(big, 8, fast), memory)[0].name == first
    near = dataclasses.replace(JOB, parameters=30 * 10**9, layers=48, hidden=7168, sequence=2048, micro_batch=1,
                               micro_batches=32, flops=150e12)  # fmt: skip
    assert order(estimates(near, 8, LinkCost(5e-6, 1 / 100e9)), 80 * 2**30)[0].name == "ZeRO-3"


def test_a_group_inside_a_machine_has_its_links() -> None:
    """Members of a layer lie together, then those of the data, then the stages."""
    outside, inside = LinkCost(1e-3, 1e-6), LinkCost(1e-5, 1e-9)

    def seconds_of(name: str, members: int, machine: int, **options: tuple[int, int, int]) -> float:
        found = estimates(JOB, members, outside, inside=inside, machine=machine, **options)
        return next(one.communicating for one in found if one.name == name)

    assert seconds_of("TP", 8, 8) < seconds_of("TP", 8, 4) == by_name()["TP"].communicating
    assert seconds_of("DP", 6, 8) < seconds_of("DP", 6, 4) == by_name(6)["DP"].communicating
    whole = by_name(split=(2, 2, 2))["3D"].communicating
    times = [seconds_of("3D", 8, machine, split=(2, 2, 2)) for machine in (1, 2, 3, 4, 8)]
    assert whole == times[0] == times[2]  # two do not lie in each machine of three
    assert times[0] > times[1] > times[3] > times[4]


def test_3d_is_a_split_that_fits_where_there_is_one() -> None:
    job = dataclasses.replace(JOB, layers=16)
    best = next(one for one in estimates(job, 12, LINK) if one.name == "3D")
    small = next(one for one in estimates(job, 12, LINK, memory=best.memory - 1) if one.name == "3D")
    assert small.memory < best.memory
    assert small.step > best.step


@pytest.mark.parametrize(("members", "split"), [(0, None), (8, (2, 2, 3)), (8, (-2, -2, 2)), (16, (1, 16, 1))])
def test_what_is_no_world_is_refused(members: int, split: tuple[int, int, int] | None) -> None:
    with pytest.raises(ValueError, match="member"):
        estimates(JOB, members, LINK, split=split)


def test_what_is_no_job_is_refused() -> None:
    with pytest.raises(ValueError, match="1 or above"):
        dataclasses.replace(JOB, hidden=0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lower_bound("broadcast", 1, 2), "broadcast"),
        (lambda: seconds("ring", 1, 2, LINK, kind="gather"), "gather"),
        (lambda: seconds("tree", 1, 2, LINK, kind="all_gather"), "tree"),
    ],
)
def test_what_has_no_halves_is_refused(call: object, says: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=says):
        call()

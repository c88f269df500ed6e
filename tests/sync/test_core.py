"""The pure core of sync_state: manifests, the election, who sends what, and that all of it ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wancoll.errors import ConfigError, OperationAborted, ProtocolError
from wancoll.sync.manifest import (
    HEADER_BYTES,
    STRIPE,
    Content,
    Entry,
    Header,
    decode,
    encode,
    fingerprint,
    lengths,
    pack_header,
    stripes,
    unpack_header,
)
from wancoll.sync.rounds import PACK, Delivery, RoundReport, decode_report, encode_report, next_round
from wancoll.sync.strategy import MAJORITY, OVERWRITE, RECEIVE_ONLY, SEND_ONLY, STRATEGIES
from wancoll.sync.verdict import Goal, goal, judge

GIB = 1 << 30


def entry(key: str, nbytes: int, dtype: str = "uint8", shares: int = -1) -> Entry:
    return Entry(key, dtype, (nbytes,), nbytes, shares)


def content(entries: list[Entry], values: dict[int, int] | None = None) -> Content:
    """All stripes have digest 1, but for those in *values*."""
    count = len(stripes(entries))
    return Content(tuple(entries), b"".join((values or {}).get(i, 1).to_bytes(8, "little") for i in range(count)))


def header(revision: int, what: str = "a", strategy: str = MAJORITY) -> Header:
    return Header(revision, strategy, what.encode().ljust(16), 10)


def a_goal(sizes: list[int], missing: dict[str, set[int]], silent: set[str] | None = None) -> Goal:
    entries = [entry(f"t{i:05}", nbytes) for i, nbytes in enumerate(sizes)]
    return Goal(
        tuple(entries),
        tuple(stripes(entries)),
        content(entries).digests,
        {name: frozenset(numbers) for name, numbers in missing.items()},
        frozenset(silent or ()),
    )


def reports_of(found: Goal) -> dict[str, RoundReport]:
    return {name: RoundReport(numbers) for name, numbers in found.missing.items()}


# ---- manifests ---------------------------------------------------------------------------------------


def test_a_large_tensor_is_cut_without_gaps() -> None:
    nbytes = 9 * GIB + 12345
    entries = [entry("a", 7), entry("big", nbytes), entry("empty", 0), entry("tied", 7, shares=0), entry("z", STRIPE)]
    found = stripes(entries)
    at = 0
    for stripe in found[1:-1]:
        assert (stripe.entry, stripe.offset) == (1, at)
        at += stripe.nbytes
    assert at == nbytes
    assert (found[0].nbytes, found[-1].entry, found[-1].nbytes, found[-2].nbytes) == (7, 4, STRIPE, 12345)
    assert len(found) == len(lengths(nbytes)) + 2


def test_what_is_encoded_comes_back() -> None:
    one = content([entry("b", 2 * STRIPE + 1, "complex64"), entry("ä" * 300, 5)], {1: 2**64 - 1})
    assert decode(encode(one), "m") == one
    assert fingerprint(encode(one)) != fingerprint(encode(content(list(one.entries))))
    for strategy in STRATEGIES:
        this = Header(2**63 - 1, strategy, b"f" * 16, 2**40)
        assert len(pack_header(this)) == HEADER_BYTES
        assert unpack_header(pack_header(this), "m") == this
    names = [f"m{i}" for i in range(11)]
    report = RoundReport(frozenset({0, 8, 16}), frozenset({"m3", "m10"}), "ä" * 600)
    data = encode_report(report, 17, names)
    assert decode_report(data, 17, names, "m") == RoundReport(report.missing, report.bad, "ä" * 250)


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(content([entry("a", 5)]))[:-1], b"\x92\x90\xc4\x01\x00"])
def test_nonsense_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="m7"):
        decode(data, "m7")
    with pytest.raises(ProtocolError, match="m7"):
        unpack_header(data.ljust(HEADER_BYTES, b"\0"), "m7")


@pytest.mark.parametrize(
    "entries",
    [
        [Entry("a", "float32", (1,), 1 << 60)],  # a list of its stripes would fill the memory
        [Entry("a", "float32", (1,), -5)],
        [Entry("a", "float32", (1,), 4), Entry("a", "float32", (1,), 4)],
        [Entry("b", "float32", (1,), 4), Entry("a", "float32", (1,), 4)],
        [Entry("a", "float32", (1,), 4, 77)],
        [Entry("a", "float32", (1,), 4, 0)],
        [Entry("a", "float32", (1,), 4, -7)],
        [Entry("a", "float32", (1,), 4), Entry("b", "float32", (1,), 4, 0), Entry("c", "float32", (1,), 4, 1)],
    ],
    ids=range(8),
)
def test_a_manifest_that_contradicts_itself_is_refused_by_name(entries: list[Entry]) -> None:
    with pytest.raises(ProtocolError, match="m7: sent a manifest that contradicts itself"):
        decode(encode(Content(tuple(entries), b"8" * 8)), "m7")


def test_a_key_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="m7"):
        decode(encode(content([entry("a", 4)])).replace(b"\xa1a", b"\xa1\xff"), "m7")


# ---- the election ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "member", "revision", "holders", "differing"),
    [
        ([header(5), header(5), header(5)], "m0", 5, "m0 m1 m2", ""),
        ([header(5), header(7, "b"), header(5)], "m1", 7, "m1", "m0 m2"),  # a revision beats a majority
        ([header(5, "b"), header(5), header(5)], "m1", 5, "m1 m2", "m0"),  # then most members
        ([header(5, "b"), header(5), header(4), header(4)], "m0", 5, "m0", "m1 m2 m3"),  # then the lowest rank
        ([header(9, "b", RECEIVE_ONLY), header(5), header(4)], "m1", 5, "m1 m2", "m0"),  # no vote
        ([header(9, "b", OVERWRITE), header(5), header(4)], "m1", 5, "m1 m2", "m0"),
        ([header(9, "a", RECEIVE_ONLY), header(5), header(6, "c", SEND_ONLY)], "m2", 6, "m2", "m0 m1"),
    ],
)
def test_who_wins(headers: list[Header], member: str, revision: int, holders: str, differing: str) -> None:
    won = judge({f"m{i}": each for i, each in enumerate(headers)})
    assert (won.member, won.revision) == (member, revision)
    assert (" ".join(won.holders), " ".join(won.differing)) == (holders, differing)


def test_nobody_votes() -> None:
    with pytest.raises(ConfigError, match=r"no member's state can win.*'receive-only' by m0, 'overwrite' by m1"):
        judge({"m0": header(1, "a", RECEIVE_ONLY), "m1": header(1, "a", OVERWRITE)})


def test_who_may_not_be_changed_and_loses() -> None:
    with pytest.raises(ConfigError) as caught:
        judge({"m0": header(7), "m1": header(6, "b", SEND_ONLY), "m2": header(7)})
    for text in ("m1", "the state of m0, m2, revision 7", "revision 6"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("other", "texts"),
    [
        ([entry("a", 4)], ("lacks a tensor", "'b'", "expected uint8[8], as on m0", "got no such key")),
        ([entry("a", 4), entry("b", 8), entry("c", 1)], ("too many", "'c'", "no such key, as on m0", "got uint8[1]")),
        ([entry("a", 4), entry("b", 9)], ("another shape or dtype", "'b'", "uint8[8], as on m0", "got uint8[9]")),
        ([entry("a", 4), entry("b", 8, "int8")], ("another shape or dtype", "uint8[8], as on m0", "got int8[8]")),
        ([entry("a", 4), entry("b", 8, shares=0)], ("shares its memory", "'b'", "memory of its own", "of 'a'")),
    ],
)
def test_states_that_do_not_fit(other: list[Entry], texts: tuple[str, ...]) -> None:
    mine = content([entry("a", 4), entry("b", 8)])
    headers = {"m0": header(1), "m1": header(1), "m2": header(1, "c")}
    with pytest.raises(ConfigError) as caught:
        goal(judge(headers), headers, {"m0": mine, "m1": mine, "m2": content(other)})
    for text in ("m2, sync_state", *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize("silent", [RECEIVE_ONLY, OVERWRITE])
def test_only_what_differs_is_missing(silent: str) -> None:
    entries = [entry("a", 3 * STRIPE), entry("b", 5), entry("c", 5), entry("tied", 5, shares=2)]
    headers = {"m0": header(2), "m1": header(1, "b"), "m2": header(1, "c", silent)}
    found = goal(
        judge(headers),
        headers,
        {"m0": content(entries), "m1": content(entries, {1: 9}), "m2": content(entries, {0: 3, 4: 8})},
    )
    assert found.missing == {"m0": frozenset(), "m1": frozenset({1}), "m2": frozenset({0, 4})}
    assert found.tensors(found.missing["m1"]) == [0]
    assert found.tensors(found.missing["m2"]) == [0, 2, 3]
    assert found.nbytes(found.missing["m2"]) == STRIPE + 5
    assert found.silent == {"m2"}
    assert found.digest(1) == 1


# ---- the plan ----------------------------------------------------------------------------------------


def load(deliveries: list[Delivery], names: list[str]) -> list[int]:
    return [sum(each.nbytes for each in deliveries if each.sender == name) for name in names]


def test_holders_share_the_load_and_take_turns() -> None:
    count = 64
    found = a_goal([count * STRIPE], {"a": set(), "j": set(range(count)), "b": set(), "c": set()})
    deliveries = next_round(found, reports_of(found))
    assert sorted(number for each in deliveries for number in each.stripes) == list(range(count))
    assert max(load(deliveries, ["a", "b", "c"])) - min(load(deliveries, ["a", "b", "c"])) <= STRIPE
    assert all({each.sender for each in deliveries[i : i + 3]} == {"a", "b", "c"} for i in range(0, 60, 3))


def test_ten_thousand_tiny_tensors_are_a_few_deliveries() -> None:
    found = a_goal([1000] * 10_000, {"a": set(), "b": set(), "j": set(range(10_000))})
    deliveries = next_round(found, reports_of(found))
    assert len(deliveries) == 3  # 10 MB in packs of 4 MiB
    assert {each.sender for each in deliveries} == {"a", "b"}
    assert all(each.nbytes <= PACK for each in deliveries)
    assert sorted(number for each in deliveries for number in each.stripes) == list(range(10_000))


def test_who_differs_in_one_tensor_sends_the_others() -> None:
    found = a_goal([STRIPE] * 40, {"a": set(), "b": {0}, "c": set(range(1, 40))})
    deliveries = next_round(found, reports_of(found))
    assert load(deliveries, ["a", "b"]) == [20 * STRIPE, 20 * STRIPE]


def test_those_with_a_choice_make_up_for_those_without() -> None:
    """Only a has the second half, so all of the first half comes from b."""
    found = a_goal([STRIPE] * 40, {"j": set(range(40)), "a": set(), "b": set(range(20, 40))})
    deliveries = next_round(found, reports_of(found))
    assert load(deliveries, ["a", "b"]) == [40 * STRIPE, 20 * STRIPE]


def test_a_member_that_cannot_take_part() -> None:
    found = a_goal([5], {"a": set(), "b": {0}})
    with pytest.raises(OperationAborted, match=r"b, sync_state: a member cannot take part; got the arena has no room"):
        next_round(
            found, {"a": RoundReport(frozenset()), "b": RoundReport(frozenset({0}), problem="the arena has no room")}
        )


def test_what_nobody_holds_any_more() -> None:
    found = a_goal([5, 5], {"a": set(), "b": {0}, "c": {0, 1}})
    left = {name: report for name, report in reports_of(found).items() if name != "a"}
    with pytest.raises(OperationAborted, match=r"nobody is left.*a holder of 't00000'"):
        next_round(found, left)


@pytest.mark.parametrize("who_says_so", ["a", "c"])
def test_a_pair_that_cannot_meet_goes_through_a_third(who_says_so: str) -> None:
    found = a_goal([5], {"a": set(), "b": {0}, "c": {0}})
    reports = reports_of(found)
    reports[who_says_so] = RoundReport(found.missing[who_says_so], frozenset({"a", "c"} - {who_says_so}))
    assert next_round(found, reports) == [Delivery("a", "b", (0,), 5)]
    reports["b"] = RoundReport(frozenset())
    assert next_round(found, reports) == [Delivery("b", "c", (0,), 5)]
    del reports["b"]
    with pytest.raises(OperationAborted, match="nobody is left"):
        next_round(found, reports)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Goal, int]:
    sizes = draw(st.lists(st.sampled_from([0, 1, 1000, PACK - 1, STRIPE, 2 * STRIPE + 7, 300 * STRIPE]), max_size=8))
    count = sum(len(lengths(nbytes)) for nbytes in sizes)
    names = [f"m{i}" for i in range(draw(st.integers(1, 6)))]
    rng = random.Random(draw(st.integers(0, 2**32)))
    missing: dict[str, set[int]] = {}
    for name in names:
        share = draw(st.sampled_from([0.0, 0.0, 0.1, 0.9, 1.0]))
        missing[name] = {number for number in range(count) if rng.random() < share}
    silent = {name for name in names if draw(st.integers(0, 4)) == 0}
    return a_goal(sizes, missing, silent), draw(st.integers(0, 2**32))


def check_round(found: Goal, reports: dict[str, RoundReport], deliveries: list[Delivery]) -> None:
    seen: set[tuple[str, int]] = set()
    for each in deliveries:
        assert each.sender != each.receiver
        assert each.sender not in found.silent
        assert each.receiver not in reports[each.sender].bad
        assert each.sender not in reports[each.receiver].bad
        assert each.nbytes == found.nbytes(each.stripes)
        assert len(each.stripes) == 1 or each.nbytes <= PACK
        for number in each.stripes:
            assert number not in reports[each.sender].missing, "a sender holds what it sends"
            assert number in reports[each.receiver].missing
            assert (each.receiver, number) not in seen, "sent once"
            seen.add((each.receiver, number))
    for name, report in reports.items():
        for number in report.missing:
            able = [
                one
                for one, other in reports.items()
                if one not in found.silent | report.bad and name not in other.bad and number not in other.missing
            ]
            assert ((name, number) in seen) == bool(able)


@settings(max_examples=150, deadline=None)
@given(situations())
def test_rounds_end_with_everything_everywhere_or_with_a_reason(situation: tuple[Goal, int]) -> None:
    """Members die, deliveries fail: whoever is left has all, or something is nowhere to be had."""
    found, seed = situation
    rng = random.Random(seed)
    reports = reports_of(found)
    gone: set[str] = set()
    for turn in range(100):
        try:
            deliveries = next_round(found, reports)
        except OperationAborted:
            assert any(
                all(number in other.missing or one in found.silent or one in report.bad or name in other.bad
                    for one, other in reports.items() if one != name)
                for name, report in reports.items() for number in report.missing
            )  # fmt: skip
            return
        assert deliveries == next_round(found, dict(reports))
        check_round(found, reports, deliveries)
        if not deliveries:
            break
        if turn < 5 and rng.random() < 0.3:
            gone.add(rng.choice(sorted(reports)))
        arrived: dict[str, set[int]] = {name: set() for name in reports}
        bad: dict[str, set[str]] = {name: set(report.bad) for name, report in reports.items()}
        for each in deliveries:
            fails = rng.random() < 0.05 or (gone & {each.sender, each.receiver} and rng.random() < 0.5)
            if fails:
                bad[each.receiver].add(each.sender)
                bad[each.sender].add(each.receiver)
            else:
                arrived[each.receiver].update(each.stripes)
        reports = {
            name: RoundReport(report.missing - arrived[name], frozenset(bad[name]))
            for name, report in reports.items()
            if name not in gone
        }
        if not reports:
            return
    else:
        pytest.fail("does not end")
    assert not any(report.missing for report in reports.values())


def test_equal_shares_for_several_receivers() -> None:
    rng: Any = random.Random(5)
    for _ in range(50):
        names = [f"h{i}" for i in range(rng.randint(1, 5))]
        joiners = [f"j{i}" for i in range(rng.randint(1, 3))]
        count = rng.randint(1, 50)
        found = a_goal(
            [STRIPE] * count, {name: set(range(count if name in joiners else 0)) for name in names + joiners}
        )
        deliveries = next_round(found, reports_of(found))
        shares = load(deliveries, names)
        assert max(shares) - min(shares) <= STRIPE
        assert sum(shares) == count * STRIPE * len(joiners)

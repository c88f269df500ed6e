"""What changed between two epochs, made and put together again."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wancoll.errors import ProtocolError
from wancoll.wire import messages as m
from wancoll.wire.epochs import BRIEF, applied, brief, change
from wancoll.wire.framing import decode_body, encode

PLANS = [
    m.Plan(8, 1 << 18, True, {}, [], 0, ""),
    m.Plan(4, 1 << 18, False, {"all_reduce": [(0, "ring")]}, [], 5, "bbr"),
]
MEMBERS = [m.MemberInfo(mid, f"m{mid}", f"d{mid}", [f"h{mid}:1"], "") for mid in range(1, 13)]
MOVED = [m.MemberInfo(mid, f"m{mid}", f"d{mid}", [f"h{mid}:2"], "") for mid in range(1, 13)]

members = st.lists(st.sampled_from(MEMBERS + MOVED), min_size=1, unique_by=lambda member: member.mid)
voids = st.lists(
    st.builds(
        m.Void,
        st.integers(1, 30),
        st.just("OperationAborted"),
        st.sampled_from(["short", "long " * 30]),
        st.sampled_from([{}, {"m1": "a", "m2": "b"}]),
    ),
    unique_by=lambda void: void.seq,
)


def epochs(number: int) -> st.SearchStrategy[m.Epoch]:
    return st.builds(
        m.Epoch,
        group=st.just("g"),
        to=st.just(0),
        term=st.integers(1, 3),
        epoch=st.just(number),
        members=members,
        plan=st.sampled_from(PLANS),
        key=st.sampled_from([b"k" * 16, b"l" * 16]),
        min_world=st.integers(1, 2),
        committed_upto=st.integers(0, 30),
        voids=voids,
        reason=st.text(max_size=20),
        goodbyes=st.lists(st.sampled_from(["m1", "m2"]), unique=True),
    )


@given(epochs(1), epochs(2))
def test_what_changed_put_together_is_the_epoch_or_the_whole_is_told(base: m.Epoch, epoch: m.Epoch) -> None:
    told = change(base, epoch)
    if told is None:
        kept = [brief(void) for void in base.voids if void.seq > epoch.committed_upto]
        assert (base.key, base.min_world, kept) != (epoch.key, epoch.min_world, epoch.voids[: len(kept)])
    else:
        assert applied(base, decode_body(encode(told)[4:], m.FromMaster)) == epoch


@given(epochs(1), members, st.sampled_from(PLANS), st.integers(0, 30), voids)
def test_what_a_master_does_to_an_epoch_needs_no_whole(
    base: m.Epoch, now: list[m.MemberInfo], plan: m.Plan, upto: int, new: list[m.Void]
) -> None:
    kept = [brief(void) for void in base.voids if void.seq > upto]
    fresh = [void for void in new if void.seq > upto and void.seq not in {one.seq for one in kept}]
    epoch = msgspec.structs.replace(
        base, epoch=2, members=now, plan=plan, committed_upto=upto, voids=kept + fresh, reason="lost one"
    )
    told = change(base, epoch)
    assert told is not None
    assert applied(base, told) == epoch
    assert told.voids == fresh, "a text is said once"
    assert (told.plan is None) == (plan == base.plan)


def test_a_loss_among_a_thousand_takes_few_bytes() -> None:
    many = [
        m.MemberInfo(mid, f"member-{mid}", f"daemon-{mid}", [f"10.0.{mid >> 8}.{mid & 255}:7401"], "")
        for mid in range(1, 1001)
    ]
    base = m.Epoch("g", 0, 1, 1, many, PLANS[0], b"k" * 16, 1, 5, [], "formed")
    epoch = msgspec.structs.replace(base, epoch=2, members=many[:300] + many[301:], reason="lost member-301")
    told = change(base, epoch)
    assert told is not None
    assert len(encode(told)) < 100 < 30_000 < len(encode(epoch))


def test_a_change_of_another_epoch_is_refused() -> None:
    base = m.Epoch("g", 0, 1, 1, MEMBERS, PLANS[0], b"k" * 16, 1, 5, [], "formed")
    told = change(base, msgspec.structs.replace(base, epoch=3, members=MEMBERS[1:]))
    assert told is not None
    with pytest.raises(ProtocolError, match="expected epoch 2 of group g; got epoch 1 of group g"):
        applied(msgspec.structs.replace(base, epoch=2), told)


@pytest.mark.parametrize(
    "wrong",
    [{"left": [99]}, {"order": [0, 1]}, {"order": [0] * 11}, {"order": [*range(10), -1]}, {"order": [*range(10), 11]}],
    ids=str,
)
def test_an_impossible_change_is_refused(wrong: dict[str, list[int]]) -> None:
    base = m.Epoch("g", 0, 1, 1, MEMBERS, PLANS[0], b"k" * 16, 1, 5, [], "formed")
    told = change(base, msgspec.structs.replace(base, epoch=2, members=MEMBERS[1:]))
    assert told is not None
    with pytest.raises(ProtocolError, match="impossible change of members"):
        applied(base, msgspec.structs.replace(told, **wrong))


def test_a_text_that_is_told_again_is_short() -> None:
    short, long = (m.Void(1, "OperationAborted", text, {}) for text in ("x" * BRIEF, "x" * (BRIEF + 1)))
    assert brief(short) == short
    assert brief(long).text == "x" * (BRIEF - 3) + "..."
    assert brief(msgspec.structs.replace(short, calls={"m1": "a"})) == short

"""Descriptors: what members must agree on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from wancoll.collective import Codec, Descriptor, DType, Kind, ReduceOp

BASE = Descriptor(Kind.all_reduce, DType.float32, ReduceOp.sum, 1000)

descriptors = st.builds(
    Descriptor,
    st.sampled_from(Kind),
    st.sampled_from(DType),
    st.sampled_from(ReduceOp),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(-1, 3),
    st.sampled_from(Codec),
    st.sampled_from(["auto", "ring"]),
    st.sampled_from(["retry", "raise"]),
    st.sampled_from(["nearest", "stochastic"]),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.5, 30.0]),
    st.sampled_from(["", "BOR of bool"]),
)


def test_a_change_of_any_field_changes_the_fingerprint():
    other = {
        "kind": Kind.update_membership,
        "dtype": DType.int32,
        "op": ReduceOp.max,
        "count": 1001,
        "counts": (600, 400),
        "root": 0,
        "codec": Codec.int8,
        "algorithm": "ring",
        "on_failure": "raise",
        "rounding": "stochastic",
        "seed": 1,
        "grace": 0.5,
        "label": "BOR of bool",
        "bounded": True,
    }
    assert set(other) == {field.name for field in fields(Descriptor)}
    prints = [replace(BASE, **{name: value}).fingerprint() for name, value in other.items()]
    assert len({BASE.fingerprint(), *prints}) == 1 + len(other)


@given(descriptors, descriptors)
def test_fingerprints_are_equal_only_for_equal_calls(one, two):
    assert (one.fingerprint() == two.fingerprint()) == (one == two)
    assert 0 <= one.fingerprint() < 2**64


def test_the_fingerprint_is_the_same_in_every_process():
    """Members are different processes, maybe of different Python versions: the value is part of the protocol."""
    assert BASE.fingerprint() == int.from_bytes(bytes.fromhex(KNOWN), "little")


KNOWN = "93d270fa28e91a0f"


def test_sizes_and_text():
    assert [dtype.itemsize for dtype in DType] == [4, 8, 2, 2, 1, 2, 4, 8, 1]
    assert BASE.nbytes == 4000
    assert str(BASE) == "all_reduce(1000 x float32, op=sum)"
    assert str(replace(BASE, codec=Codec.int8, on_failure="raise")) == (
        "all_reduce(1000 x float32, op=sum, codec=int8, on_failure=raise)"
    )
    assert str(Descriptor(Kind.update_membership)) == "update_membership()"
    assert str(Descriptor(Kind.barrier, label="all_to_all")) == "barrier(label=all_to_all)"
    assert str(Descriptor(Kind.broadcast, DType.int8, count=5, root=2)) == "broadcast(5 x int8, root=2)"
    named = Descriptor(Kind.reduce, DType.int8, count=5, root=1, grace=1.0).told(["a", "b"])
    assert named == "reduce(5 x int8, op=sum, root=1 (b), grace=1.0)"
    uneven = Descriptor(Kind.all_gather, counts=(1, 2))
    assert (str(uneven), uneven.nbytes, uneven.block_counts(2)) == ("all_gather([1, 2] x float32)", 12, (1, 2))
    assert replace(BASE, kind=Kind.scatter).block_counts(3) == (1000, 1000, 1000)

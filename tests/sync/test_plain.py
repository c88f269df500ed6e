"""Plain values of a state: they come back as they were, and what is hostile makes a ProtocolError and nothing else."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wancoll.errors import ConfigError, ProtocolError
from wancoll.sync.manifest import Content, Entry, Header, Thing
from wancoll.sync.plain import MAX_DEPTH, MAX_TUPLES, Slot, fill, pack, unpack
from wancoll.sync.verdict import goal, judge

NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
KEYS = st.one_of(st.text(max_size=5), NUMBERS, st.none(), st.tuples(st.integers(0, 3), st.text(max_size=2)))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3).map(Counter),
    ),
    max_leaves=20,
)


def no_slot(_value: Any, _path: str) -> None:
    return None


def exactly(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return set(one) == set(other) and all(exactly(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(exactly, one, other))
    return bool(one == other)


@given(TREES)
def test_what_is_packed_comes_back(tree: Any) -> None:
    assert exactly(unpack(pack(tree, "x", no_slot), "x"), tree)


def test_the_order_of_keys_does_not_matter_and_tensors_have_places() -> None:
    def slot_of(value: Any, path: str) -> Slot | None:
        seen.append(path)
        return Slot("numpy") if isinstance(value, np.ndarray) else None

    seen: list[str] = []
    array = np.ones(2)
    one = pack({"b": 1, "a": [array, (array, np.float32(0.5), np.int64(3))], 7: None}, "x", slot_of)
    assert {"a.0", "a.1.0", "7"} <= set(seen)
    assert one == pack(OrderedDict([(7, None), ("a", [array, (array, 0.5, 3)]), ("b", 1)]), "x", slot_of)
    tree = fill(unpack(one, "x"), lambda path, slot: (path, slot.library))
    assert tree == {"a": [("a.0", "numpy"), (("a.1.0", "numpy"), 0.5, 3)], "b": 1, 7: None}


def nested(depth: int, around: Any) -> bytes:
    data = b"\xc0"
    for _ in range(depth):
        data = around(data)
    return data


def mapping(keys: Iterable[bytes]) -> bytes:
    found = list(keys)
    return msgpack.Packer().pack_map_header(len(found)) + b"".join(key + b"\xc0" for key in found)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # a list of 2^32 - 1 items
        b"\xdf\xff\xff\xff\xff",
        b"\x81\x90\xc0",  # a list as key
        b"\xc0\xc0",
        b"\xd4\x05\x00",  # types that are not known
        b"\xd6\xff\x00\x00\x00\x00",  # a time
        b"\xc7\x05\x03other",  # a tensor of no known library
        msgpack.packb(msgpack.ExtType(1, b"\x80")),  # a tuple that is a dict
        msgpack.packb(msgpack.ExtType(4, bytes(2000))),
        nested(MAX_DEPTH * 3, lambda inner: b"\x91" + inner),
        nested(5000, lambda inner: b"\x91" + inner),
        nested(MAX_DEPTH * 2, lambda inner: msgpack.packb(msgpack.ExtType(1, b"\x91" + inner))),
        bytes(5 << 20),
        mapping(msgpack.packb(msgpack.ExtType(4, (1 << 64).to_bytes(9, "little"))) for _ in range(1)),
        mapping(msgpack.packb(msgpack.ExtType(1, msgpack.packb([1] * 9))) for _ in range(1)),
        mapping(msgpack.packb(msgpack.ExtType(1, msgpack.packb([i]))) for i in range(MAX_TUPLES + 1)),
    ],
    ids=range(18),
)
def test_what_is_hostile_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="m7"):
        unpack(data, "m7")


@pytest.mark.parametrize("key", [1 << 64, -(1 << 63) - 1, (1, (2,)), tuple(range(9)), ((1 << 64),)])
def test_keys_that_cannot_be_carried_are_refused_where_they_are(key: Any) -> None:
    with pytest.raises(ConfigError, match="key that cannot be carried"):
        pack({"a": {key: 1}}, "x", no_slot)


@given(st.one_of(st.binary(max_size=60), TREES.map(lambda tree: pack(tree, "x", no_slot))), st.data())
def test_damaged_bytes_make_no_other_error(data: bytes, draw: Any) -> None:
    damaged = bytearray(data)
    for at in draw.draw(st.lists(st.integers(0, max(0, len(damaged) - 1)), max_size=3)):
        if damaged:
            damaged[at] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        unpack(bytes(damaged), "x")


# ---- what a member lacks of a state with other tensors than its own -----------------------------------


def content(entries: list[Entry], values: list[int], *, loose: bool = True) -> Content:
    digests = b"".join(value.to_bytes(8, "little") for value in values)
    return Content(tuple(entries), digests, (Thing("Net", False, b""), Thing("Opt", loose, b"")))


def of(member: str, contents: dict[str, Content], revisions: dict[str, int]) -> Any:
    headers = {name: Header(revisions[name], "majority", name.encode().ljust(16), 1) for name in contents}
    return goal(judge(headers), headers, contents).missing[member]


def test_a_loose_thing_may_hold_other_tensors() -> None:
    weight, new, state, other = (Entry(key, "float32", (1,), 4) for key in ("Net/w", "Opt/a", "Opt/b", "Opt/c"))
    longer = Entry("Opt/b", "float32", (2,), 8)
    won = content([weight, new, state], [1, 2, 3])
    revisions = {"m0": 9, "m1": 0}
    for mine, lacks in [
        (content([weight], [1]), {1, 2}),
        (content([weight], [5]), {0, 1, 2}),
        (content([weight, state, other], [1, 3, 7]), {1}),
        (content([weight, longer], [1, 3]), {1, 2}),
        (content([weight, new, state], [1, 2, 3]), set()),
    ]:
        assert of("m1", {"m0": won, "m1": mine}, revisions) == lacks
        assert of("m0", {"m0": won, "m1": mine}, revisions) == set()
    with pytest.raises(ConfigError, match=r"m1, sync_state.*'Net/w'.*another shape"):
        of("m1", {"m0": won, "m1": content([Entry("Net/w", "float32", (2,), 8)], [1])}, revisions)
    with pytest.raises(ConfigError, match="other things"):
        of("m1", {"m0": won, "m1": content([weight, new, state], [1, 2, 3], loose=False)}, revisions)

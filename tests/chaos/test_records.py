"""What the proxies see of sealed lanes: where records end, and what attacks make of them."""

from __future__ import annotations

import pytest

from tests.faults.attacks import Attacker, Records, split, tampered
from wancoll.testing.forwarding import Lane, Rule

ONE, TWO, THREE = (b"\x17\x03\x03" + bytes([0, len(body)]) + body for body in (b"a" * 9, b"", b"ccc"))


def test_whole_records_in_pieces_of_any_size() -> None:
    data = ONE + TWO + THREE
    for size in range(1, len(data) + 1):
        records = Records()
        cut = [records.whole(data[at : at + size]) for at in range(0, len(data), size)]
        assert b"".join(cut) == data
        assert all(b"".join(split(each)) == each for each in cut)


@pytest.mark.parametrize(
    ("kind", "becomes"),
    [
        ("drop", [ONE, THREE]),
        ("repeat", [ONE, TWO, TWO, THREE]),
        ("reorder", [ONE, THREE, TWO]),
        ("splice", [ONE, b"other", TWO, THREE]),
    ],
)
def test_an_attack_is_of_one_record(kind: str, becomes: list[bytes]) -> None:
    data = ONE + TWO + THREE
    assert tampered(data, kind, 0.5, b"other") == b"".join(becomes)
    lane, rule = Lane(0, 1, 0, 0), Rule(1, kind, 0, 1, 0, 0.0, 0.5, None)
    assert Attacker(None, []).attacked(lane, rule, data) == data, "it is in clear"


def test_a_flip_is_of_one_bit() -> None:
    flipped = Attacker(None, []).attacked(Lane(0, 1, 0, 0), Rule(1, "flip", 0, 1, 0, 0.0, 1.0, None), ONE)
    assert [a ^ b for a, b in zip(ONE, flipped, strict=True)] == [0] * (len(ONE) - 1) + [0x10]

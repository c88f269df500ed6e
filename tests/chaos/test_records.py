"""What the proxies see of sealed lanes: where records end, and what attacks make of them."""

from __future__ import annotations

import pytest

from wancoll.testing.records import Records, split, tampered

ONE, TWO, THREE = (b"\x17\x03\x03" + bytes([0, len(body)]) + body for body in (b"a" * 9, b"", b"ccc"))


def test_whole_records_in_pieces_of_any_size() -> None:
    data = ONE + TWO + THREE
    for size in range(1, len(data) + 1):
        records = Records()
        cut = [records.whole(data[at : at + size]) for at in range(0, len(data), size)]
        assert b"".join(cut) == data
        assert all(b"".join(split(each)) == each for each in cut)
    assert Records.last(data) == THREE


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
    assert tampered(data, kind, 0.5, b"other", sealed=True) == b"".join(becomes)
    assert tampered(data, kind, 0.5, b"other", sealed=False) == data


def test_a_flip_is_of_one_bit() -> None:
    flipped = tampered(ONE, "flip", 1.0, b"", sealed=True)
    assert [a ^ b for a, b in zip(ONE, flipped, strict=True)] == [0] * (len(ONE) - 1) + [0x10]

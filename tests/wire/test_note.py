"""A note's layout, and what is none."""

from __future__ import annotations

import pytest

from wancoll.errors import ProtocolError
from wancoll.wire.messages import Vote
from wancoll.wire.note import NOTE_BYTES, ROUNDS, NewRound, pack, unpack

ONE = Vote("g", 2, 1, 1)


def test_a_note_comes_out_as_it_went_in() -> None:
    vote = Vote("g", 2, 3, 42, (1 << 64) - 1, 1 << 63, 41)
    packed = pack(vote)
    assert len(packed) == NOTE_BYTES == 41
    assert packed == bytes.fromhex("01 0300000000000000 2900000000000000 2a00000000000000 ffffffffffffffff") + bytes(
        7
    ) + bytes([0x80])
    assert unpack(packed, "g", 2) == vote


def test_a_round_comes_out_as_it_went_in() -> None:
    packed = pack(NewRound(3, 41))
    assert packed == bytes.fromhex("02 0300000000000000 2900000000000000")
    assert unpack(packed, "g", 2) == NewRound(3, 41)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pack(ONE)[:-1],
        pack(ONE) + b"\0",
        b"\2" + pack(ONE)[1:],
        b"\1" + pack(NewRound(1, 1))[1:],
    ],
)
def test_what_is_no_note_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="sent no note"):
        unpack(data, "g", 2)


def test_numbers_come_to_no_end() -> None:
    with pytest.raises(ProtocolError, match="impossible"):
        unpack(pack(Vote("g", 2, (1 << 62) + 1, 1)), "g", 2)
    for begun in (NewRound((1 << 62) + 1, 1), NewRound(1, ROUNDS)):
        with pytest.raises(ProtocolError, match="impossible"):
            unpack(pack(begun), "g", 2)

"""A note's layout, and what is none."""

from __future__ import annotations

import pytest

from wancoll.errors import ProtocolError
from wancoll.wire.note import NOTE_BYTES, ROUNDS, NewRound, Note, unpack


def test_a_note_comes_out_as_it_went_in() -> None:
    note = Note(3, 41, 42, (1 << 64) - 1, 1 << 63)
    packed = note.pack()
    assert len(packed) == NOTE_BYTES == 41
    assert packed == bytes.fromhex("01 0300000000000000 2900000000000000 2a00000000000000 ffffffffffffffff") + bytes(
        7
    ) + bytes([0x80])
    assert unpack(packed) == note


def test_a_round_comes_out_as_it_went_in() -> None:
    packed = NewRound(3, 41).pack()
    assert packed == bytes.fromhex("02 0300000000000000 2900000000000000")
    assert unpack(packed) == NewRound(3, 41)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        Note(1, 0, 1).pack()[:-1],
        Note(1, 0, 1).pack() + b"\0",
        b"\2" + Note(1, 0, 1).pack()[1:],
        b"\1" + NewRound(1, 1).pack()[1:],
    ],
)
def test_what_is_no_note_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="sent no note"):
        unpack(data)


def test_numbers_come_to_no_end() -> None:
    with pytest.raises(ProtocolError, match="impossible"):
        unpack(Note((1 << 62) + 1, 0, 1).pack())
    for begun in (NewRound((1 << 62) + 1, 1), NewRound(1, ROUNDS)):
        with pytest.raises(ProtocolError, match="impossible"):
            unpack(begun.pack())

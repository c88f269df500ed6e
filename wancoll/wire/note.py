"""What members say to each other about commits: notes of fixed layouts, on a lane of their own. Pure.

    Vote        41 bytes, little endian; group and member are the link's
    kind        1 byte, 1
    epoch       8 bytes, of which all else is
    committed   8 bytes: up to here all is committed, as the sender knows
    seq         8 bytes: the operation that the sender has finished, its vote; 0 for none
    digest      8 bytes, of its result; 0 where results differ by rank
    fingerprint 8 bytes, of the call

    NewRound    17 bytes, little endian
    kind        1 byte, 2
    epoch       8 bytes
    number      8 bytes: the sender has begun this round of the epoch

    Ask         17 bytes, little endian
    kind        1 byte, 3
    epoch       8 bytes
    committed   8 bytes: the sender lacks votes above this, and asks for them

Repeating a note changes nothing, so a member may say again whatever was lost with a link.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from wancoll.errors import ProtocolError
from wancoll.wire.messages import MOST, Vote

_LAYOUT, _ROUND_LAYOUT = struct.Struct("<BQQQQQ"), struct.Struct("<BQQ")
_KIND, _ROUND_KIND, _ASK_KIND = 1, 2, 3
ROUND_BITS = 16
ROUNDS = 1 << ROUND_BITS  # of an epoch, at most
NOTE_BYTES = _LAYOUT.size
DIGEST_AT = 25  # bytes before it


class NewRound(NamedTuple):
    """Announces round *number* of an epoch."""

    epoch: int
    number: int


class Ask(NamedTuple):
    """Asks for the votes above *committed* again."""

    epoch: int
    committed: int


def pack(note: Vote | NewRound | Ask) -> bytes:
    """The bytes of *note*."""
    if isinstance(note, Vote):
        return _LAYOUT.pack(_KIND, note.epoch, note.committed, note.seq, note.digest, note.fingerprint)
    return _ROUND_LAYOUT.pack(_ROUND_KIND if isinstance(note, NewRound) else _ASK_KIND, *note)


def unpack(data: bytes, group: str, mid: int) -> Vote | NewRound | Ask:
    """The note in *data*, which member *mid* of *group* has sent. Raises ProtocolError: it is none."""
    note: Vote | NewRound | Ask
    counted: tuple[int, ...]  # that are no bits
    kind = data[0] if data else 0
    if kind == _KIND and len(data) == NOTE_BYTES:
        _, epoch, committed, seq, digest, fingerprint = _LAYOUT.unpack(data)
        note, counted = Vote(group, mid, epoch, seq, digest, fingerprint, committed), (epoch, committed, seq)
    elif kind in (_ROUND_KIND, _ASK_KIND) and len(data) == _ROUND_LAYOUT.size:
        _, epoch, number = _ROUND_LAYOUT.unpack(data)
        note, counted = NewRound(epoch, number) if kind == _ROUND_KIND else Ask(epoch, number), (epoch, number)
    else:
        raise ProtocolError("sent no note", expected=f"{NOTE_BYTES} bytes of kind {_KIND}", got=data[:64].hex())
    if max(counted) > MOST or (kind == _ROUND_KIND and counted[1] >= ROUNDS):
        expected = f"numbers up to {MOST}, and less than {ROUNDS} rounds"
        raise ProtocolError("sent an impossible note", expected=expected, got=str(counted))
    return note

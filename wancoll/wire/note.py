"""What members say to each other about commits: one note of a fixed layout, on a lane of their own. Pure.

    note        41 bytes, little endian
    kind        1 byte, 1
    epoch       8 bytes, of which all else is
    committed   8 bytes: up to here all is committed, as the sender knows
    seq         8 bytes: the operation that the sender has finished, 0 for none
    digest      8 bytes, of its result; 0 where results differ by rank
    fingerprint 8 bytes, of the call

Repeating a note changes nothing, so a member may say again whatever was lost with a link.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from wancoll.errors import ProtocolError

_LAYOUT = struct.Struct("<BQQQQQ")
_KIND = 1
_MOST = 1 << 62  # as of all numbers on the wire
NOTE_BYTES = _LAYOUT.size


class Note(NamedTuple):
    """See the module."""

    epoch: int
    committed: int
    seq: int = 0
    digest: int = 0
    fingerprint: int = 0

    def pack(self) -> bytes:
        """For the wire."""
        return _LAYOUT.pack(_KIND, *self)


def unpack(data: bytes) -> Note:
    """The note in *data*.

    Raises:
        ProtocolError: it is none.
    """
    if len(data) != NOTE_BYTES or data[0] != _KIND:
        raise ProtocolError("sent no note", expected=f"{NOTE_BYTES} bytes of kind {_KIND}", got=data[:64].hex())
    note = Note(*_LAYOUT.unpack(data)[1:])
    if max(note.epoch, note.committed, note.seq) > _MOST:
        raise ProtocolError("sent an impossible note", expected=f"numbers up to {_MOST}", got=str(note))
    return note

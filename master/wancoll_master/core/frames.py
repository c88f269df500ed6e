"""The bytes of one message to many members, encoded once. Pure."""

from __future__ import annotations

import msgspec

from wancoll.wire import messages as m
from wancoll.wire.framing import HEADER_BYTES


def encode_epochs(epoch: m.Epoch, mids: list[int]) -> list[bytes]:
    """The frames of *epoch* for each of *mids*: all but Epoch.to is encoded once, since worlds may be large."""
    pack = msgspec.msgpack.encode
    whole = pack(msgspec.structs.replace(epoch, to=0))
    at = 1 + len(pack(type(epoch).__name__)) + len(pack(epoch.group))  # an array's first byte, tag, group; then the 0
    head, tail = whole[:at], whole[at + 1 :]
    bodies = (head + pack(mid) + tail for mid in mids)
    return [len(body).to_bytes(HEADER_BYTES, "big") + body for body in bodies]

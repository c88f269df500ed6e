"""Frames and messages: any cut of the byte stream gives the same messages, and nonsense is named, never believed."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wancoll.errors import ProtocolError
from wancoll.wire import messages as m
from wancoll.wire.framing import HEADER_BYTES, Decoder, body_length, encode

MESSAGES: list[m.FromPeer] = [
    m.Hello(1, "d0", 7, ["[::1]:7401", "example.org:7401"], 8, "here", "0.1.0"),
    m.Join("g", "m0", 4, 2),
    m.Vote("g", 1, 2, 3, (1 << 64) - 1, 1 << 63),
    m.GiveUp("g", 1, 2, [3, 4], "why"),
    m.Mismatch("g", 1, 2, 3, "all_reduce(5 x float32, op=sum)"),
]


@given(st.lists(st.integers(0, 400), max_size=20))
def test_any_cut_gives_the_same_messages(cuts: list[int]) -> None:
    stream = b"".join(map(encode, MESSAGES))
    decoder: Decoder[m.FromPeer] = Decoder(m.FromPeer, 4096)
    found: list[m.FromPeer] = []
    at = 0
    for cut in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        found += decoder.feed(stream[at:cut])
        at = cut
    assert found == MESSAGES
    assert decoder._buffer == b""


def test_a_started_frame_is_kept() -> None:
    frame = encode(MESSAGES[0])
    decoder: Decoder[m.FromPeer] = Decoder(m.FromPeer, 4096)
    assert decoder.feed(frame + frame[:9]) == [MESSAGES[0]]
    assert decoder._buffer == frame[:9]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_bodies_are_plain_msgpack(message: m.FromPeer) -> None:
    """As the msgpack package reads and writes it."""
    frame = encode(message)
    plain = msgpack.unpackb(frame[HEADER_BYTES:])
    assert plain[0] == type(message).__name__
    again = msgpack.packb(plain)
    assert Decoder(m.FromPeer, 4096).feed(len(again).to_bytes(4, "big") + again) == [message]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x00",
        msgpack.packb(["Nobody", 1]),
        msgpack.packb(["Leave", "g"]),
        msgpack.packb(["Leave", "g", "m", "", False, "more"]),
        msgpack.packb(["Leave", "g", "m", "x" * 1025]),
        msgpack.packb(["Leave", "g", 5]),
        msgpack.packb(["Leave", "", "m"]),
        msgpack.packb(["Leave", "g" * 129, "m"]),
        msgpack.packb(["Join", "g", "m", 0, 1]),
        msgpack.packb(["Heartbeat", -1]),
        msgpack.packb(["GiveUp", "g", 1, 1, [0] * 1025]),
        b"\x92\xa5Leave\xa2\xff\xfe",
        b"\x91" * 5000,
    ],
    ids=str,
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="somebody: sent a message that cannot be read"):
        Decoder(m.FromPeer, 1 << 16, "somebody").feed(len(body).to_bytes(4, "big") + body)


@pytest.mark.parametrize("length", [4097, 0xFFFFFFFF])
def test_an_oversized_frame_is_refused_before_it_comes(length: int) -> None:
    header = length.to_bytes(4, "big")
    with pytest.raises(ProtocolError, match=f"oversized frame; expected at most 4096 bytes; got {length}"):
        Decoder(m.FromPeer, 4096).feed(header)
    with pytest.raises(ProtocolError, match="oversized"):
        body_length(header, 4096)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        for message in Decoder(m.FromPeer, 4096).feed(data):
            assert isinstance(message, msgspec.Struct)
    except ProtocolError:
        pass

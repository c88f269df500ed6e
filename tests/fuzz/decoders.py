"""Bytes into the decoders of all messages: whole ones that were tampered with, and what was never one.

Either a message comes out that can be sent on, or ProtocolError, which names it.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from tests.fuzz.absurd import Absurd, Drawn, kinds
from wancoll.errors import ProtocolError
from wancoll.wire import messages as m
from wancoll.wire.framing import HEADER_BYTES, Decoder, decode_body, encode

UNIONS: tuple[Any, ...] = (
    m.FromPeer, m.FromMaster, m.FromClient, m.FromDaemon, m.LaneFirst, m.LaneAnswer, m.Signed, m.KeyReceipt,
)  # fmt: skip
MAX_BYTES = 1 << 16
_pack = msgspec.msgpack.Encoder().encode


def bodies(seed: int) -> list[bytes]:
    """Messages of each class, as they travel."""
    absurd, chance = Absurd(), Drawn(seed)
    every = dict.fromkeys(kind for union in UNIONS for kind in kinds(union))
    made = [encode(absurd.message(kind, chance))[HEADER_BYTES:] for kind in every for _ in range(4)]
    return [body for body in made if len(body) <= 2048]


def tampered(body: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """With a few of its bytes changed, taken out, or put in."""
    data = bytearray(body)
    for _ in range(1 + int(draw.random() * 3)):
        at = int(draw.random() * len(data)) if data else 0
        match int(draw.random() * 5):
            case 0 if data:
                data[at] ^= 1 << int(draw.random() * 8)
            case 1 if data:
                data[at] = (0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xCB, 0xCF, 0xD9, 0xDD, 0xDF, 0xFF)[
                    int(draw.random() * 12)
                ]
            case 2:
                del data[at : at + 1 + int(draw.random() * 8)]
            case 3:
                data[at:at] = draw.randbytes(1 + int(draw.random() * 8))
            case _:
                other = others[int(draw.random() * len(others))]
                data[at:] = other[int(draw.random() * len(other)) :]
    return bytes(data)


def one(body: bytes) -> int:
    """Every decoder on one body; returns how many took it."""
    taken = 0
    for union in UNIONS:
        try:
            message = decode_body(body, union, who="fuzz")
        except ProtocolError:
            continue
        _pack(message)
        taken += 1
    return taken


def stream(data: bytes, kind: Any = m.FromPeer) -> None:
    """A connection's bytes, in two pieces, through the framing."""
    decoder: Decoder[Any] = Decoder(kind, MAX_BYTES, "fuzz")
    half = len(data) // 2
    try:
        decoder.feed(data[:half])
        decoder.feed(data[half:])
    except ProtocolError:
        return
    assert len(decoder._buffer) <= MAX_BYTES + HEADER_BYTES


def run(seed: int, inputs: int) -> tuple[int, int]:
    """So many inputs of the decoders, six of each body; returns how many there were, and how many were taken."""
    draw = random.Random(seed)
    basis, made, taken = bodies(seed), 0, 0
    while made < inputs:
        body = tampered(basis[int(draw.random() * len(basis))], draw, basis)
        taken += one(body)
        made += len(UNIONS)
        if draw.random() < 0.1:
            stream(len(body).to_bytes(HEADER_BYTES, "big") + body + draw.randbytes(5))
            made += 1
    return made, taken

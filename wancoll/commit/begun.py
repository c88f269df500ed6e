"""Calls that an engine has begun by itself, as it tells them to the daemon and the daemon to its member (C13). Pure."""

from __future__ import annotations

from typing import NamedTuple


class RingCall(NamedTuple):
    """A call as the client has put it into a slot of its ring; offsets are in the arena, -1: there is no table."""

    number: int  # the client's own
    prepared: int  # number of the prepared call
    input_buffer: int
    result_buffer: int
    filled: int
    shown: int


class Begun(NamedTuple):
    """A call that the engine has begun, and how far it has come."""

    call: RingCall
    seq: int
    engine_id: int  # of its attempt
    posted_at: float  # seconds on the shell's clock
    seconds: float  # that it took, where it is committed
    done: bool  # it is finished here, and all others were told the vote
    committed: bool  # and the client was told so
    digest: int
    bytes_sent: int
    bytes_saved: int
    codec_error: float
    bytes_in_memory: int
    heard: frozenset[int]  # mids of the members whose vote has come
    heard_digest: int  # what these say

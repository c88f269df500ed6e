"""Notes by the engine's typed face. native/tests/test_engine.c has order, floods, and what breaks the protocol."""

from __future__ import annotations

import select
import socket

import pytest

from tests.engine.engines import DEADLINE, hand_over, statistics, tcp_pair, wait_for
from wancoll.collective import DType, ReduceOp
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT
from wancoll.native.engine import NOTE_BYTES, Engine, Hearers, LaneDown, Note
from wancoll.schedule.steps import Schedule

LANES = 2


def next_notes(engine: Engine, count: int) -> list[Note]:
    found: list[Note] = []
    while len(found) < count:
        assert select.select([engine.notes_fd], [], [], DEADLINE)[0], f"{len(found)} of {count} notes came"
        found += engine.notes()
    return found


def test_notes_arrive_as_they_were_and_those_of_a_lost_connection_are_lost_with_it() -> None:
    with Engine() as a, Engine() as b:
        ends = tcp_pair()
        for engine, link, end in ((a, 1, ends[0]), (b, 2, ends[1])):
            engine.open_link(link, LANES, epoch=1)
            assert engine.send_note(link, b"too early: it is lost")
            assert engine.statistics(link, LANES) is None
            engine.attach_lane(link, LANES, hand_over(end))
        sent = [bytes([i]) * (1 + i % NOTE_BYTES) for i in range(200)]
        assert all(a.send_note(1, note) for note in sent)
        assert next_notes(b, len(sent)) == [Note(2, note) for note in sent]
        assert b.send_note(2, b"back")
        assert next_notes(a, 1) == [Note(1, b"back")]
        assert statistics(a, 1, LANES).frames_sent == statistics(b, 2, LANES).frames_received == len(sent)
        assert a.tcp_info(1, LANES) == b""
        for note in (b"", bytes(NOTE_BYTES + 1)):
            with pytest.raises(ConfigError, match=f"{len(note)} bytes for link 1"):
                a.send_note(1, note)
        with pytest.raises(ConfigError, match="link 3"):
            a.send_note(3, b"nobody there")
        again = tcp_pair()
        a.attach_lane(1, LANES, hand_over(again[0]), connection=2)
        assert wait_for(a, LaneDown) == LaneDown(1, LANES, 0, "notes: another connection takes its place", 1, True)
        assert select.select([b.notes_fd], [], [], DEADLINE)[0]
        assert b.notes() == []
        lost = wait_for(b, LaneDown)
        assert (lost.link, lost.lane, lost.connection, lost.goes_on) == (2, LANES, 1, True)
        assert statistics(b, 2, LANES).attached is False
        assert b.send_note(2, b"it is lost")
        b.attach_lane(2, LANES, hand_over(again[1]), connection=2)
        assert a.send_note(1, b"as before")
        assert next_notes(b, 1) == [Note(2, b"as before")]
        a.close_link(1)
        assert select.select([b.notes_fd], [], [], DEADLINE)[0]
        assert b.notes() == []
        assert wait_for(b, LaneDown) == LaneDown(2, LANES, 0, "notes: closed by the other end", 2, True)


def test_all_votes_that_a_member_may_say_again_leave_at_once_over_a_lane_that_takes_few() -> None:
    """A socket takes few bytes, as where its window has yet to open: the notes wait here."""
    votes = 2 * DEFAULT.ops_in_flight + DEFAULT.zero_contributions + 1
    with Engine() as a, Engine() as b:
        for engine, end in zip((a, b), tcp_pair(), strict=True):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, 4096)
            engine.open_link(1, LANES, epoch=1)
            engine.attach_lane(1, LANES, hand_over(end))
        assert all(a.send_note(1, b"%d" % i) for i in range(votes))
        came: list[bytes] = []
        while len(came) < votes:
            assert select.select([b.notes_fd], [], [], DEADLINE)[0]
            came += [note.note for note in b.notes()]
            a.notes()  # what waits leaves
        assert came == [b"%d" % i for i in range(votes)]


def test_a_link_whose_other_end_takes_no_notes_breaks_when_the_engine_has_one_to_say() -> None:
    """A note that is lost alone would be missed for ever."""
    with Engine() as engine:
        mine, theirs = tcp_pair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        engine.open_link(1, LANES, epoch=1)
        engine.attach_lane(1, LANES, hand_over(theirs))
        while engine.send_note(1, bytes(NOTE_BYTES)):
            pass
        nothing = engine.prepare(
            Schedule(()),
            {},
            dtype=DType.int32,
            op=ReduceOp.sum,
            input_bytes=0,
            result_bytes=0,
            world_size=1,
            lanes=LANES,
        )
        engine.post(nothing, 7, 1, 1, 9, 0, 0, vote=b"done", hearers=Hearers([1]))
        down = wait_for(engine, LaneDown)
        assert (down.link, down.lane, down.text) == (1, LANES, "notes: the other end takes none")
        mine.close()

"""Notes by the engine's typed face. native/tests/test_engine.c has order, floods, and what breaks the protocol."""

from __future__ import annotations

import select

import pytest

from tests.engine.engines import DEADLINE, hand_over, statistics, tcp_pair, wait_for
from wancoll.engine import NOTE_BYTES, Engine, LaneDown, Note
from wancoll.errors import ConfigError

LANES = 2


def next_notes(engine: Engine, count: int) -> list[Note]:
    found: list[Note] = []
    while len(found) < count:
        assert select.select([engine.notes_fd], [], [], DEADLINE)[0], f"{len(found)} of {count} notes came"
        found += engine.notes()
    return found


def test_notes_arrive_as_they_were_and_end_with_their_lane() -> None:
    with Engine() as a, Engine() as b:
        ends = tcp_pair()
        for engine, link, end in ((a, 1, ends[0]), (b, 2, ends[1])):
            engine.open_link(link, LANES, epoch=1)
            assert not engine.send_note(link, b"too early")
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
        a.close_link(1)
        assert select.select([b.notes_fd], [], [], DEADLINE)[0]
        assert b.notes() == []
        assert wait_for(b, LaneDown) == LaneDown(2, LANES, 0, "notes: closed by the other end")
        assert not b.send_note(2, b"too late")
        assert statistics(b, 2, LANES).attached is False

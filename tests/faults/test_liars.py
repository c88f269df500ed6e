"""A member runs changed code: it sends one of two others other bytes, and lies about what is committed."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.support import in_threads
from wancoll.errors import WancollError
from wancoll.testing.cluster import Cluster

CALLS, ELEMENTS = 2, 6 << 20
LIAR = """
from wancoll.native.engine import Engine
from wancoll.peer.core import commands as cmd
from wancoll.peer.core.collectives import Collectives
from wancoll.peer.session import Session
from wancoll.schedule.steps import Buffer, Direction, Place
from wancoll.wire.messages import Vote
from wancoll.wire.note import pack

real_hear, real_prepare, real_session = Collectives.hear, Engine.prepare, Session._prepare


def hear(self, sender, note):  # whoever says that it has finished an operation hears that it is committed
    said = real_hear(self, sender, note)
    if not isinstance(note, Vote) or note.seq <= note.committed:
        return said
    claim = Vote(note.group, 0, note.epoch, committed=note.seq)
    {answer}
    return [cmd.SendNote((sender,), pack(claim), again=True), *said]


def prepare(schedule, links, **rest):  # the last piece of the result that it passes on is its own input
    steps = list(schedule.steps)
    last = [i for i, one in enumerate(steps) if one.direction is Direction.send and one.left.buffer is Buffer.result]
    if last:
        steps[last[-1]] = steps[last[-1]]._replace(left=Place(Buffer.input, steps[last[-1]].start))
    return real_prepare(schedule._replace(steps=tuple(steps)), links, **rest)


def slowly(self, resolved, view, channel):
    for number in self.links.numbers(channel).values():
        self._daemon.engine.pace_link(number, 30_000_000)
    return real_session(self, resolved, view, channel)


Collectives.hear, Collectives._differ = hear, lambda self, seq: []
Engine.prepare, Session._prepare = staticmethod(prepare), slowly
"""
ANSWERS = {
    "says that it is committed": "pass",
    "and votes as each wants to hear": "claim = Vote(note.group, 0, note.epoch, note.seq, note.digest,"
    " note.fingerprint, note.seq)",
}


@pytest.mark.check
@pytest.mark.parametrize("answer", ANSWERS)
def test_two_honest_members_hold_no_receipts_that_contradict_each_other(answer: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIAR.replace("{answer}", ANSWERS[answer]))
    with Cluster(3, lanes=2, peer_env={0: {"PYTHONPATH": str(tmp_path)}}) as cluster:
        held: list[dict[int, tuple[Any, ...]]] = [{}, {}, {}]

        def run(k: int) -> None:
            comm = cluster.connect(k, group="g", start_world=3, name=f"m{k}", timeout=30)
            try:
                for call in range(CALLS):
                    receipt = comm.all_reduce(np.full(ELEMENTS, 10.0**k, np.float32))
                    held[k][call] = receipt.epoch, receipt.contributors, zlib.crc32(np.asarray(receipt.out))
            except WancollError:
                pass  # evicted, or the operation was given up for all
            finally:
                comm.close()

        in_threads(run, 3)
        for call in held[1].keys() & held[2].keys():
            assert held[1][call] == held[2][call], f"two outcomes of operation {call + 1}"
        assert any("differ" in one.text for one in cluster.status().events)  # they did come apart

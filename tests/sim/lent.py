"""A member that is lent to the engine: the model of native/engine/calls/caller.c around the real law in C.

Mirrors caller.c (start, take_calls, commit, wc_caller_hear, wc_caller_finished, hold, look) and session.py (settle,
_offer, _take_over, look). A call need not have been made before, so more of them go this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from wancoll.collective import SAME_RESULT
from wancoll.commit.begun import Begun, RingCall
from wancoll.native import ffi, lib
from wancoll.peer.core import commands as cmd
from wancoll.peer.core.calls import Call, ResolvedCall
from wancoll.wire import messages as m
from wancoll.wire.note import pack, unpack

if TYPE_CHECKING:
    from tests.sim.daemon import Session


@dataclass(slots=True)
class _Started:
    post: m.Post
    call: Call
    resolved: ResolvedCall
    engine_id: int
    began: float
    ended: float = 0.0
    done: bool = False
    committed: bool = False
    digest: int = 0
    sent: int = 0


class Lent:
    """See the module."""

    def __init__(self, session: Session) -> None:
        self._session, self.lent = session, False
        self._law: Any = ffi.new("wc_law *")
        self._started: dict[int, _Started] = {}  # by seq, those that the daemon has not heard of
        self._by_id: dict[int, int] = {}  # seqs, by engine id
        self._others: list[int] = []
        self._next = 0
        self.commits = 0  # that the engine has made

    @property
    def called(self) -> int:
        """The highest seq that has begun."""
        return int(self._law.called)

    def lend(self) -> None:
        """If nothing stands in its way."""
        session, member = self._session, self._session.peek
        if self.lent or not session.world.lends or not session.at_rest or not member.at_rest:
            return
        tally = member.collectives.tally
        assert tally is not None
        assert member.view is not None
        self._others = sorted(tally.others)
        if not self._others:
            return
        claims = ffi.new("uint64_t[]", [tally.claims[mid] for mid in self._others])
        lib.wc_law_open(self._law, tally.epoch, len(self._others), tally.committed, claims)
        self._next, self.lent = member.attempts.next, True

    def take(self, post: m.Post) -> bool:
        """Start the call, if it is one that the engine may start."""
        session, member = self._session, self._session.peek
        view = member.view
        if not self.lent or view is None or self._session.daemon.leaseless or lib.wc_law_full(self._law):
            return False
        call = member.call(post)
        odd = call.p2p or call.world is not view.world or call.posted.grace or call.posted.rounding == "stochastic"
        if odd:
            return False
        resolved = call.resolved(view, session.daemon.limits)
        if resolved.refusal or not resolved.proves_all:
            return False
        seq, engine_id = self.called + 1, self._next
        self._next += 1
        vote = pack(m.Vote(*view.head, seq, 0, resolved.fingerprint, self._law.committed))
        lib.wc_law_start(self._law, resolved.fingerprint)
        self._started[seq] = _Started(post, call, resolved, engine_id, session.daemon.clock.now)
        self._by_id[engine_id] = seq
        session.start_lent(engine_id, seq, post.id, resolved, call.posted.kind in SAME_RESULT, vote, self._others)
        return True

    def finished(self, engine_id: int, digest: int, sent: int, compared: bool) -> bool | None:
        """The engine has finished an attempt. True: the daemon need not hear; None: nor is the vote said."""
        seq = self._by_id.get(engine_id)
        if not self.lent or seq is None:
            return False
        if self._session.daemon.leaseless:
            return None
        one = self._started[seq]
        one.done, one.digest, one.sent = True, digest, sent
        lib.wc_law_finish(self._law, seq, digest if compared else 0)
        return True

    def commit(self) -> None:
        """Commit what can be."""
        session, view = self._session, self._session.peek.view
        assert view is not None
        while self.lent and not self._session.daemon.leaseless and (seq := lib.wc_law_commit(self._law)):
            one = self._started[seq]
            one.committed, one.ended = True, session.daemon.clock.now
            self.commits += 1
            del self._by_id[one.engine_id]
            session.ended_lent(one.engine_id)
            tally = SimpleNamespace(committed=seq, epoch=view.epoch.epoch)
            names = list(view.world.names)
            session.world.judge.counts(
                SimpleNamespace(
                    collectives=SimpleNamespace(tally=tally), view=view, name=session.peek.name, member_names=names
                )
            )
            result = m.Result(
                one.post.id, seq, view.epoch.epoch, names, one.digest, 1, one.resolved.algorithm, one.sent, 0.0, 0, 0.0
            )
            session.world.told(session, result)

    def hear(self, mid: int, note: bytes) -> bool:
        """Whether the engine counts what member *mid* says."""
        if not self.lent or note[0] != 1:
            return False
        said = unpack(note, "", 0)
        assert isinstance(said, m.Vote)
        vote = ffi.new("wc_vote *", (said.epoch, said.committed, said.seq, said.digest, said.fingerprint))
        taken = bool(lib.wc_law_hear(self._law, self._others.index(mid), vote))
        if taken:
            self.commit()
        return taken

    def look(self) -> bool:
        """At a heartbeat: tell what is committed. Whether the rest may stay with the engine."""
        self._tell([seq for seq, one in self._started.items() if one.committed])
        now, interval = self._session.daemon.clock.now, self._session.daemon.limits.heartbeat_interval
        late = any(now - one.began >= interval for one in self._started.values())
        return not late and all(self._law.claims[i] <= self._law.committed for i in range(len(self._others)))

    def hold(self) -> None:
        """The daemon takes all over."""
        if self.lent:
            self.lent = self._law.open = False
            self._tell(list(self._started))
            assert not self._started
            self._by_id.clear()

    def _tell(self, seqs: list[int]) -> None:
        session = self._session
        begun, calls = [], dict[int, Call]()
        for seq in seqs:
            one, votes = self._started.pop(seq), lib.wc_law_votes(self._law, seq)[0]
            calls[seq] = one.call
            heard = frozenset(mid for i, mid in enumerate(self._others) if not one.committed and votes.voters >> i & 1)
            begun.append(
                Begun(
                    RingCall(one.post.id, seq, 0, 0, -1, -1), seq, one.engine_id, one.began, one.ended - one.began,
                    one.done, one.committed, one.digest, one.sent, 0, 0.0, 0, heard, votes.heard_digest,
                )
            )  # fmt: skip
            if one.done and not one.committed:
                session.ended_lent(one.engine_id)
        claims = {mid: self._law.claims[i] for i, mid in enumerate(self._others)}
        late = self._session.daemon.leaseless
        commands = session.peek.take_over(
            begun, calls.__getitem__, claims, self._next, session.daemon.clock.now, decide=not late
        )
        results = [one for one in commands if isinstance(one, cmd.ToClient) and isinstance(one.message, m.Result)]
        session.world.judge.check(not (late and results), f"{session.peek.name} commits after its lease (C8)")
        session.run(commands)
        if late:
            session.daemon.stop_unheard()

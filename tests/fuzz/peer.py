"""A member and its links under a master, a client and peers that talk nonsense: ProtocolError at most, no growth.

What the shell does is done here without sockets or engine: commands are carried out at once or never, as chance says.
What the member tells the master and the client can be read by them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from tests.fuzz.absurd import Absurd, Chance, kinds
from wancoll.collective import Codec, Kind, ReduceOp
from wancoll.errors import ProtocolError
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.peer.core.links import Links
from wancoll.peer.core.member import Member
from wancoll.wire import messages as m

LIMITS = Limits(ops_in_flight=8, scratch_bytes=1 << 30)
KEY = b"k" * 16
_TO_MASTER = msgspec.msgpack.Decoder(m.FromPeer)
_TO_CLIENT = msgspec.msgpack.Decoder(m.FromDaemon)
_FROM_MASTER = kinds(m.ToMember)


class Peer:
    """See the module."""

    def __init__(self, chance: Chance) -> None:
        self.chance, self.now = chance, 100.0
        self.links = Links(LIMITS)
        self.member = Member("g", "m0", 3, 1, 1 << 40, LIMITS)
        self.ends = self.links.member()
        self.engine: set[int] = set()
        self.knocks = 0
        self.connection, self.master = 1, 7
        self.epochs: list[int] = [1]
        self.seqs: list[int] = [1, 2, 3]
        self.numbers: list[int] = []
        self.absurd = Absurd(
            protocol=[PROTOCOL_VERSION],
            group=["g"],
            member=["m0"],
            mid=[1],
            to=[1],
            other=[2, 3],
            others=[[2], [3], []],
            epoch=self.epochs,
            seq=self.seqs,
            upto=self.seqs,
            ask=self.seqs,
            number=self.seqs,
            order=self.seqs,
            committed=[0, 1],
            committed_upto=[0, 1],
            peer=[0, 1, 2, -1],
            root=[-1, 0, 1, 2],
            count=[0, 1, 7],
            counts=[(), (1, 2, 3)],
            algorithm=["auto", "ring", "direct"],
            on_failure=["retry", "raise"],
            rounding=["nearest", "stochastic"],
            term=[1],
            key=[KEY],
            sender=[2, 3],
            receiver=[1],
            channel=[0, 1],
            lane=[0, 1],
            generation=[1, 2, 3],
        )
        self.run(self.member.join())
        self.hear(m.Joined("g", "m0", 1, ""))

    # ---- the shell -----------------------------------------------------------------------------------

    def run(self, commands: list[cmd.Command]) -> None:
        for command in commands:
            match command:
                case cmd.ToMaster(message):
                    _TO_MASTER.decode(msgspec.msgpack.encode(message))
                case cmd.ToClient(message):
                    _TO_CLIENT.decode(msgspec.msgpack.encode(message))
                case cmd.StartOp(op):
                    assert op.resolved is not None
                    self.engine.add(op.engine_id)
                case cmd.CancelOp():
                    pass  # answered when the engine comes to it
                case cmd.SendNote():
                    pass
                case _:
                    self.link(command)

    def link(self, event: links.Event | links.Wish) -> None:
        wished = isinstance(event, links.Wish)
        said = self.links.ask(self.ends, event, self.now) if wished else self.links.step(event, self.now)
        for command in said:
            match command:
                case links.Dial(number, _, hellos):
                    for hello in hellos[:4]:
                        if self.chance.pick(4) == 0:
                            self.link(links.Broken(number, "no"))
                        elif self.links.awaits(number, hello.lane, hello.connection):
                            self.link(links.Attached(number, hello.lane))
                case links.Welcome(_, number, lane):
                    if self.chance.pick(4) and self.links.awaits(number, lane):
                        self.link(links.Attached(number, lane))
                case links.OpenLink() | links.MoveLink() | links.CloseLink() | links.Refuse():
                    pass
                case told:
                    self.run(self.member.links_say(told))

    def hear(self, message: Any) -> None:
        if self.member.addressed(message):
            self.run(self.member.hear(message, self.now, self.connection, self.master))

    # ---- nonsense ------------------------------------------------------------------------------------

    def nonsense(self) -> None:
        """One thing that happens, from any side."""
        chance, member = self.chance, self.member
        self.epochs[:] = [max(1, member.epoch_number), min(member.epoch_number + 1, m.MOST)]
        upto = member.collectives.committed
        self.seqs[:] = [min(upto + ahead, m.MOST) for ahead in range(4)]
        self.now += (0.0, 0.01, 1.0, 20.0)[chance.pick(4)]
        what = chance.pick(16)
        if what < 4:
            self.hear(self.likely(self.absurd.message(_FROM_MASTER[chance.pick(len(_FROM_MASTER))], chance)))
        elif what < 7:
            self.post()
        elif what in (7, 15) and self.engine:
            engine_id = sorted(self.engine)[chance.pick(len(self.engine))]
            self.engine.discard(engine_id)
            digest = (0, 7, (1 << 64) - 1)[chance.pick(3)]
            if chance.pick(2):
                self.run(member.op_finished(engine_id, digest, 0))
            else:
                self.run(member.op_cancelled(engine_id))
        elif what == 8:
            self.knocks += 1
            hello = self.absurd.message(m.LaneHello, chance)
            if self.ends.epoch is not None and chance.pick(4):
                hello = msgspec.structs.replace(hello, plan=links.wire_plan(self.ends.epoch))
            self.link(links.Knock(self.knocks, hello))
            if chance.pick(2):
                self.link(links.Gone(self.knocks))
        elif what == 9:
            numbers = [*self.links.open(), 0, 1 << 62]
            self.link(links.Broken(numbers[chance.pick(len(numbers))], "gone"))
        elif what == 10:
            self.link(links.Tick())
        elif what == 11:
            self.connection, self.master = self.connection + 1, (7, 8)[chance.pick(2)]
            self.run(member.reconnected(self.connection, self.master))
        elif what == 12:
            self.run(member.mismatch(self.seqs[chance.pick(4)]))
        elif what == 13 and self.links.open():
            number = list(self.links.open())[chance.pick(len(self.links.open()))]
            for lane in range(4):
                if self.links.awaits(number, lane):
                    self.link(links.Attached(number, lane))
        elif what == 14 and chance.pick(8) == 0:
            self.run(member.leave("detached"))

    def likely(self, message: Any) -> Any:
        """An Epoch that this member is in, mostly; seldom what ends all."""
        if isinstance(message, m.Evicted | m.Refused) and self.chance.pick(8):
            return m.Commit("g", self.member.epoch_number, self.seqs[self.chance.pick(4)], 1)
        if not isinstance(message, m.Epoch) or self.chance.pick(8) == 0:
            return message
        size = 1 + self.chance.pick(3)
        who = [m.MemberInfo(1 + i, f"m{i}", f"d{i}", [f"d{i}:1"], "") for i in range(size)]
        plan = message.plan
        if self.chance.pick(4):
            plan = msgspec.structs.replace(plan, choices={}, lanes=1 + self.chance.pick(2), lane_groups=1)
        return msgspec.structs.replace(message, members=who, plan=plan, min_world=1 + self.chance.pick(2))

    def post(self) -> None:
        post = self.absurd.message(m.Post, self.chance)
        if self.member.in_flight >= LIMITS.ops_in_flight or self.member.epoch is None:
            return
        call = post.call
        if self.chance.pick(2):
            collective = self.chance.pick(2)
            kind = (Kind.all_reduce, Kind.barrier, Kind.update_membership)[self.chance.pick(3)]
            plain = {"root": -1, "counts": (), "codec": Codec.none, "op": ReduceOp.sum, "algorithm": "auto"}
            call = msgspec.structs.replace(call, kind=kind if collective else Kind.send, **plain)
            if call.kind is not Kind.all_reduce:
                call = msgspec.structs.replace(call, count=call.count if not collective else 0)
        post = msgspec.structs.replace(post, call=call)
        self.run(self.member.post(post, self.member.call(post), self.now))

    def check(self) -> None:
        """No structure holds more than its bound."""
        member = self.member
        assert member.in_flight <= LIMITS.ops_in_flight
        assert len(self.links.open()) <= 16
        assert len(member.master_session.said) <= 1024
        assert len(member.p2p.settlements) <= 1024
        if member.over:
            assert not self.ends.links


def run(chance: Chance, sequences: int, length: int = 40) -> None:
    """As many members, each of which hears *length* things.

    Who is found to talk nonsense is cut off in truth. Here it goes on, since what is refused must have changed nothing.
    """
    for _ in range(sequences):
        peer = Peer(chance)
        for _ in range(length):
            with contextlib.suppress(ProtocolError):
                peer.nonsense()
            if peer.member.over and chance.pick(4) == 0:
                break
        peer.check()

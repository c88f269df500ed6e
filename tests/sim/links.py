"""The links of a simulated daemon: the real core, its commands carried out on connections in memory.

Stands for wancoll/peer/links/hub.py: it dials, accepts, hands over, and keeps the core's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Process, Timer
from tests.sim.engine import Engine
from tests.sim.network import End
from wancoll.peer.core import links as core
from wancoll.wire import messages as m
from wancoll.wire.note import ROUND_BITS, ROUNDS

if TYPE_CHECKING:
    from tests.sim.world import World


class LinkHub:
    """See the module."""

    def __init__(self, world: World, process: Process, engine: Engine) -> None:
        self._world, self._process, self._engine = world, process, engine
        self.core = core.Links(world.limits)
        self._tell: dict[core.MemberLinks, Callable[[core.Told], None]] = {}
        self._dials: dict[int, list[Timer]] = {}  # by the link's number: they time out
        self._knocking: dict[int, tuple[End, m.LaneHello]] = {}
        self._taken: dict[tuple[core.MemberLinks, int, int], int] = {}  # generations
        self._believed: dict[core.MemberLinks, set[int]] = {}  # what members were told is up, since they entered
        self._knocks = count(1)
        self._depth = 0  # members that are told something take steps of their own
        self._tick: Timer | None = None

    def member(self, tell: Callable[[core.Told], None]) -> core.MemberLinks:
        links = self.core.member()
        self._tell[links] = tell
        return links

    def ask(self, owner: core.MemberLinks, wish: core.Wish) -> None:
        if isinstance(wish, core.Enter | core.Leave):
            self._believed.pop(owner, None)
        if isinstance(wish, core.Enter):  # where a journal was lost a newcomer may have the mid of one who left
            present = {member.mid for member in wish.epoch.members}
            known = self._taken.items()
            self._taken = {key: newest for key, newest in known if key[0] is not owner or key[1] in present}
        self._run(self.core.ask(owner, wish, self._process.clock.now))

    def step(self, event: core.Event) -> None:
        self._run(self.core.step(event, self._process.clock.now))

    def _run(self, commands: list[core.Command]) -> None:
        self._depth += 1
        for command in commands:
            self._carry_out(command)
        self._depth -= 1
        if not self._depth:
            self._judge()
        if self._tick is not None:
            self._tick.cancel()
        self._tick = self._process.at(self.core.deadline(), lambda: self.step(core.Tick()))

    def _judge(self) -> None:
        """What a member takes for up is up: else it would wait for bytes that are lost."""
        for owner, believed in self._believed.items():
            gone = believed - owner.up(core.COLLECTIVES)
            self._world.judge.check(not gone, f"{owner.mid} was not told that its links to {sorted(gone)} are lost")

    def send_note(self, owner: core.MemberLinks, mid: int, note: bytes) -> None:
        """Dropped where the link is not up."""
        link = owner.links.get((mid, core.COLLECTIVES))
        if link is not None and link.up:
            for _ in range(self._world.copies()):
                self._engine.send_note(link.number, note)

    def lane_down(self, number: int, reason: str, lane: int, connection: int, goes_on: bool) -> None:
        self.step(core.LaneLost(number, lane, connection, reason) if goes_on else core.Broken(number, reason))

    def noted(self, number: int, note: bytes) -> None:
        link = self.core.open().get(number)
        if link is not None:
            self._tell[link.owner](core.Noted(link.owner, link.other.mid, note))

    def _carry_out(self, command: core.Command) -> None:
        self._world.note(self._process.name, f"links: {brief(command)}")
        match command:
            case core.OpenLink(number, stamp, _):
                self._engine.open_link(number, stamp)
            case core.MoveLink(number, stamp, _):
                self._engine.set_epoch(number, stamp)
            case core.CloseLink(number):
                for timer in self._dials.pop(number, []):
                    timer.fire()
                self._engine.close_link(number)
            case core.Dial(number, other, hellos, way):
                self._dials.setdefault(number, []).extend(self._dial(number, other, hello, way) for hello in hellos)
            case core.Welcome(knock, number):
                end, hello = self._knocking.pop(knock)
                owner = next(one for one in self.core.members if one.mid == hello.receiver)
                key = owner, hello.sender, hello.channel
                if hello.connection % 2:  # else it is of a set that was dialled from here
                    newest = self._taken[key] = max(hello.generation, self._taken.get(key, 0))
                    self._world.judge.check(hello.generation == newest, f"{hello} was let in after generation {newest}")
                end.send(m.LaneWelcome(self._process.name))
                came: list[Any] = []  # in the socket, until the engine has it: sending takes a turn
                end.on_message = came.append
                self._process.after(0.0, partial(self._hand_over, number, hello, end, came))
            case core.Refuse(knock, reason, over):
                end, _ = self._knocking.pop(knock)
                end.send(m.LaneRefused(reason, over=over))
                end.close("refused")
            case _:
                if isinstance(command, core.LinksUp):
                    self._believed[command.owner] = set(command.owner.up(core.COLLECTIVES))
                elif isinstance(command, core.NotesLost) or (
                    isinstance(command, core.LinkLost) and command.channel == core.COLLECTIVES
                ):
                    self._believed.get(command.owner, set()).discard(command.other.mid)
                self._tell[command.owner](command)

    def _hand_over(self, number: int, hello: m.LaneHello, end: End, came: Sequence[Any] = ()) -> None:
        lane = hello.lane
        if not self.core.awaits(number, lane, hello.connection):
            end.close("of no use any more")
        elif not end.open:
            self.step(core.NotAttached(number, lane, "it went away during the handshake", hello.connection))
        else:
            self._engine.attach(number, lane, hello.connection, end)
            self.step(core.Attached(number, lane))
            for message in came:
                end.on_message(message)

    def _dial(self, number: int, other: m.MemberInfo, hello: m.LaneHello, way: m.Way) -> Timer:
        """One lane; firing the timer gives up."""
        process, opened = self._process, []

        def fail(reason: str) -> None:
            timeout.cancel()
            for end in opened:
                end.on_message = end.on_close = lambda message: None
                end.close("gave up")
            self.step(core.NotAttached(number, hello.lane, reason, hello.connection))

        def connected(end: End | None) -> None:
            if end is None:
                if timeout.call is not None:
                    fail("connection refused")
            elif timeout.call is None:
                end.close("too late")
            else:
                opened.append(end)
                end.on_message, end.on_close = partial(greeted, end), fail
                end.send(hello)

        def greeted(end: End, answer: m.LaneWelcome | m.LaneRefused) -> None:
            if isinstance(answer, m.LaneRefused):
                fail(answer.reason)
                if answer.over:
                    self.step(core.Broken(number, answer.reason))
            elif answer.daemon != other.daemon:
                fail(f"expected daemon {other.daemon}, got {answer.daemon}")
            else:
                timeout.cancel()
                self._hand_over(number, hello, end)

        timeout = process.after(self._world.limits.connect_timeout, lambda: fail("no answer"))
        self._world.network.connect(
            process, other.addresses[0], "lane", self._world.limits.lane_timeout, connected, way
        )
        return timeout

    def accept(self, end: End, hello: m.LaneHello) -> None:
        silent = self._world.network.filtered(end.other.process.host, self._process.host, hello.channel)
        if silent is not None:
            if not silent:
                end.close("a firewall")
            return
        knock = next(self._knocks)
        self._knocking[knock] = end, hello
        end.on_message = lambda message: None
        end.on_close = lambda reason: None  # as in the product: who sent its hello is not listened to
        self.step(core.Knock(knock, hello))


def brief(command: core.Command) -> str:
    """A command for the trace."""
    match command:
        case core.OpenLink(number, stamp, plan):
            return f"open {number} at {stamp >> ROUND_BITS}.{stamp % ROUNDS}, {plan.lanes} lanes"
        case core.MoveLink(number, stamp, _):
            return f"move {number} to {stamp >> ROUND_BITS}.{stamp % ROUNDS}"
        case core.Dial(number, other, hellos, way):
            return f"dial {number}: {hellos[0].sender} to {other.name}, generation {hellos[0].generation}, {way.name}"
        case core.LinksUp(owner, epoch):
            return f"those of {owner.mid} to {sorted(owner.up(core.COLLECTIVES))} are up in epoch {epoch}"
        case core.P2PUp(owner):
            return f"those of {owner.mid} for sends and recvs to {sorted(owner.up(core.P2P))} are up"
        case core.NotesLost(owner, other):
            return f"{owner.mid} is not heard by {other.name}"
        case core.LinkBroken(owner, other, channel, reason):
            return f"all lanes of {owner.mid} to {other.name}, channel {channel}, are lost: {reason}"
        case core.LinkLost(owner, other, channel, reason):
            return f"{owner.mid} has lost that to {other.name}, channel {channel}: {reason}"
        case core.LinkUnreachable(owner, other, reason):
            return f"{other.name} is out of reach for {owner.mid}: {reason}"
    return str(command)

"""Scripts: text files that say what happens to a master, and below each line all that came of it.

    == r1: a commit needs everyone        a scenario begins, in a room of its own; lines with # explain
    limits heartbeat_timeout=1.5          what the room is like: limits of it, or of its state (`state term=5`);
                                          later on: of the next master; above the first scenario: of all of them
    form 3                                a verb of Script or Room, with its arguments
    done m0 1
        all < Commit(...)                 what the master did: messages by who gets them, lines of its event log, ...

`python -m pytest tests/master/test_scripts.py --rewrite` writes what comes now into the files: read the diff.
Messages are written without their group (if it is g), without the term (if it is the master's), and without what has
its default. `+0.1 d0 < ...` came a tenth of a second after the line began; in the event log ... stands for the reason
that a message has just told. `d0 d1 <` is one broadcast, `d0, d1 <` are two equal messages; `Probe: d0 -> d9` is a
probe that d0 is to make of d9. What nearly always comes is left out, and where it does not come `no ...` stands for it:
the Pong that answers a heartbeat, the Welcome that answers a hello or one who is back, the Joined that answers `join`
with the next number (in a running group, with probes both ways), the Commit that ends `all_done`, the Waited that
answers `slow` and names no cause, what the event log says of a broken connection and of one that is back, and its lines
that follow from a message of the same step (epoch, joined, refused, resumed, daemon). `Evicted(...), and closed`: its
connection is closed for that reason. `Epoch(...), log left`: the event log says the same reason, as an event of the
kind left. `Joined(...), all probe`: it and each member are to probe each other. `done m0,m1 1` is `done m0 1`, then
`done m1 1`. `repeat 8 VERB ...; VERB ...` is those lines eight times.
"""

from __future__ import annotations

import ast
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.master.transcript import GROUP, Room, report_of
from wancoll.cli.looking.tables import wait_lines
from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.commit.tally import UPDATE
from wancoll.limits import PROTOCOL_VERSION, Limits, counted
from wancoll.wire import messages as m
from wancoll_master.core.ready import (
    Announce,
    Broadcast,
    Close,
    Disconnected,
    Event,
    Message,
    Received,
    Record,
    Send,
    Tick,
)
from wancoll_master.core.state import Daemon, names
from wancoll_master.core.views import report

FILES = sorted(Path(__file__).with_name("scripts").glob("*.txt"))
SHOWN = "    "
USUAL = m.Plan(4, 256 << 10, True, {}, [], 0, "", lane_groups=4)  # plans show what differs from this


@dataclass
class Scenario:
    """One scenario of a file, its lines without what came of them."""

    name: str
    lines: list[str]
    shown: list[str]  # the whole text, as it stands in the file


def read(path: Path) -> tuple[str, list[Scenario]]:
    """What stands before the first scenario, and all scenarios."""
    head, *rest = path.read_text().split("\n== ")
    found = []
    for text in rest:
        name, *lines = text.rstrip("\n").split("\n")
        found.append(Scenario(name, [line for line in lines if not line.startswith(SHOWN)], lines))
    return head, found


def write(path: Path, head: str, scenarios: list[Scenario]) -> None:
    path.write_text(
        "\n\n== ".join([head.rstrip("\n"), *("\n".join([s.name, *s.shown]).rstrip() for s in scenarios)]) + "\n"
    )


def common(head: str) -> dict[str, Any]:
    """Limits that all scenarios of a file have, from what stands before the first one."""
    lines = [line.partition(" ")[2] for line in head.splitlines() if line.startswith("limits ")]
    return {name: value for line in lines for name, value in _arguments(line)[1].items()}


def play(lines: list[str], limits: dict[str, Any]) -> list[str]:
    """The lines again, each with what came of it."""
    limits = {"voters": 0} | limits
    state: dict[str, Any] = {}
    script: Script | None = None
    told = []
    for line in lines:
        told.append(line)
        verb, _, rest = line.partition(" ")
        if not verb or verb == "#":
            continue
        if verb in ("limits", "state"):
            (limits if verb == "limits" else state).update(_arguments(rest)[1])
            if script is not None:
                assert verb == "limits", "a room is made before anything happens"
                script.limits = Limits(**limits)
            continue
        script = script or Script(Limits(**limits), **state)
        told += [SHOWN + one for one in script.play(verb, rest)]
    return told


def _arguments(rest: str) -> tuple[list[Any], dict[str, Any]]:
    words, named = [], {}
    for word in shlex.split(rest):
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            named[name] = _value(value)
        else:
            words.append(_value(word))
    return words, named


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


# What `say` may write: messages by their names, in the group g unless it says another.
_WORDS: dict[str, Any] = {
    name: partial(kind, group=GROUP) if "group" in kind.__struct_fields__ else kind
    for name, kind in vars(m).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
}
_WORDS |= {"Way": m.Way, "report": report_of, "PROTOCOL_VERSION": PROTOCOL_VERSION}
_WORDS |= {"Descriptor": Descriptor, "Kind": Kind, "ReduceOp": ReduceOp}


def _many(seqs: int | tuple[int, ...]) -> tuple[int, ...]:
    return (seqs,) if isinstance(seqs, int) else seqs


def _message(text: str) -> Any:
    return eval(text, dict(_WORDS))


class Script(Room):
    """A room that plays lines and tells what the master did."""

    def __init__(self, limits: Limits | None = None, **state: Any) -> None:
        self._labels: dict[int, str] = {}  # of connections: d1, then d1' and d1'' when the daemon comes again
        self._keys: list[bytes] = []
        self._exchanges: Counter[str] = Counter()  # by member: the number of its newest send or recv
        self._broke: dict[str, float] = {}  # since when daemons' connections are broken
        self._told: list[str] = []
        self._began = 0.0
        self._verb = ""
        self._number = 0  # of the heartbeat that the master hears, if it is one
        self._logged: list[Record] = []  # lines of the event log that say a message's reason
        self._newest = 0  # the highest number that a member was given
        super().__init__(limits, **state)

    def play(self, verb: str, rest: str) -> list[str]:
        """Carry the line out."""
        self._told, self._began, self._verb = [], self.now, verb
        if verb == "?":
            known = {"state": self.state, "group": self.state.groups.get(GROUP), "journal": self.journal}
            found = getattr(self, rest) if rest.isidentifier() else eval(rest, known)
            return [str(one) for one in found] if isinstance(found, list) and found else [str(found)]
        if verb == "repeat":
            count, _, lines = rest.partition(" ")
            parts = [line.partition(" ") for line in lines.split("; ")] * int(count)
            return [one for part, _, more in parts for one in self.play(part, more)]
        if verb == "first":  # of a connection that nobody knows
            self.stranger(_message(rest))
            return self._told
        each, _, more = rest.partition(" ")
        for who in [each] if "=" in each else each.split(","):
            if verb == "say":
                self.say(who, _message(more))
            elif verb == "on":  # over a connection that is here, by its number
                self.step(Received(int(who), _message(more)))
            elif verb == "report":
                self.say(f"d{who}", _message(f"report({who}, {more})"))
            else:
                words, named = _arguments(f"{who} {more}")
                getattr(self, verb)(*words, **named)
        return self._told

    # ---- verbs beside those of Room ------------------------------------------------------------------

    def hello(self, daemon: str, *, at: str = "", **named: Any) -> int:
        return super().hello(daemon, addresses=tuple(at.split(",")) if at else (), **named)

    def join(self, member: str, *, daemon: str = "", start: int = 1, group: str = GROUP, **named: Any) -> None:
        """A daemon that is not here yet introduces itself without words."""
        daemon = daemon or "d" + member[1:]
        if daemon not in self.conns:
            self.hello(daemon)
            self._told.clear()
        mid = self._newest + 1
        super().join(member, daemon=daemon, start=start, group=group, **named)
        found = self.state.groups.get(group)
        waits, runs = (found.joining, found.members) if found else ([], [])
        why, probes = f"{len(waits) or start} of {start} members are here to start the group", ""
        if waits and runs:
            why = f"the group runs with {counted(len(runs), 'member')} in epoch {self.state.groups[group].epoch}"
            why, probes = f"{why}; joiners are admitted where all members call update_membership()", ", all probe"
        said = self._text(m.Joined(group, member, mid, why)) + probes
        self._leave_out(f"{self._label(self.conns[daemon])} < {said}", "Joined", "Refused", "postponed")

    def form(self, count: int, *, least: int = 1) -> None:
        """Members m0, m1, ... in epoch 1, without words."""
        super().form(count, least=least)
        self._told.clear()

    def all_done(self, seq: int) -> None:
        told = " ".join(dict.fromkeys(self._label(member.daemon.conn) for member in self.group.members))
        usual = f"{told} < Commit(epoch={self.epoch}, upto={seq})"
        super().all_done(seq)
        self._leave_out(usual, "Commit")

    def sleeps(self, *daemons: str) -> None:
        """They send no heartbeats from now on."""
        self.asleep.update(daemons)

    def wakes(self, *daemons: str) -> None:
        self.asleep.difference_update(daemons)

    def later(self, seconds: float) -> None:
        """The clock goes on, and nobody does anything."""
        self.now += seconds
        self._began = self.now

    def tick(self) -> None:
        self.step(Tick())

    def restarted(
        self,
        *,
        epoch: int = 1,
        mids: tuple[int, ...] = (1, 2, 3),
        base: int = 0,
        voids: dict[int, str] | None = None,
    ) -> None:
        """A new master: by the journal *epoch* had these members, *base* committed, these *voids*; 0: it was lost."""
        super().restarted(epoch, mids, base, voids)
        self._told.clear()

    def lose(self, daemon: str) -> None:
        """Its connection is gone, and nobody waits for it any more."""
        self.drop(daemon)
        self.sleep(2 * self.limits.return_grace)

    def frozen(
        self,
        name: str,
        *,
        upto: int = 0,
        done: int | tuple[int, ...] = (),
        digest: int = 7,
        apart: int | tuple[int, ...] = (),
        alone: int | tuple[int, ...] = (),
        told: int | tuple[int, ...] = (),
        updated: int = 0,
        results: dict[int, int] | None = None,
    ) -> None:
        """The member reports at the end of its epoch: all up to *upto* committed, *done* besides.

        *updated* is an update_membership; *results* (digests) stand for those that follow from *upto* and *done*.
        """
        found = [(seq, *UPDATE) if seq == updated else (seq, 7, 9) for seq in range(max(1, upto - 40), upto + 1)]
        found += [(seq, digest, 9) for seq in _many(done)]
        if results is not None:
            found = [(seq, result, 9) for seq, result in results.items()]
        found += [(seq, *UPDATE) for seq in sorted({*_many(told), *_many(alone)})]
        collected = sorted({*_many(told)}.difference(_many(alone)))
        report = m.EpochReport(upto, found, collected, list(_many(apart)))
        self.say(self._daemon(name), m.Frozen(GROUP, self.mid(name), self.epoch, report))

    def all_frozen(self) -> None:
        for name in self.names:
            self.frozen(name)

    def send(self, name: str, other: str, **call: Any) -> None:
        """The member calls send(); its calls of send and recv are numbered as they come."""
        self._exchange(name, other, sends=True, **call)

    def recv(self, name: str, other: str, **call: Any) -> None:
        self._exchange(name, other, sends=False, **call)

    def _exchange(
        self,
        name: str,
        other: str,
        *,
        sends: bool,
        tag: int = 0,
        dtype: str = "float32",
        count: int = 4,
        ahead: bool = False,
        number: int = 0,
    ) -> None:
        number = self._exchanges[name] = number or self._exchanges[name] + 1
        ends = self.mid(name), self.epoch, number, self.mid(other)
        self.say(self._daemon(name), m.P2PCall(GROUP, *ends, tag, sends, DType[dtype], count, "", ahead))

    def moved(self, name: str, order: int, digest: int = 0, *, epoch: int = 0, bad: str = "") -> None:
        """The member's half of an exchange has ended, *bad*: why it could not move."""
        self.say(self._daemon(name), m.P2PDone(GROUP, self.mid(name), epoch or self.epoch, order, digest, bad))

    def evict(self, member: str = "", *, reason: str = "") -> None:
        """An operator evicts a member, or the whole group."""
        self.stranger(m.Evict(PROTOCOL_VERSION, GROUP, member, not member, reason))

    def beats(self, seconds: float, **said: tuple[int, int]) -> None:
        """For so long each daemon says what its member has called and committed: `beats 4.5 m0=6,5 m1=5,5`."""
        for _ in range(max(1, round(seconds / 0.5))):
            for name, (called, committed) in said.items():
                self.say(self._daemon(name), m.Heartbeat(1, [(self.mid(name), self.epoch, called, committed)]))
            self.sleep(min(seconds, 0.5))

    def beat(self, **called: int) -> None:
        """Heartbeats of all members that are awake; how many operations their clients have called, if not one."""
        for member in self.group.members:
            if member.daemon.name not in self.asleep:
                self.say(member.daemon.name, m.Heartbeat(1, [(member.mid, self.epoch, called.get(member.name, 1), 0)]))

    def still(self, name: str, seconds: float, state: str) -> None:
        """The daemon says that the process of the member's client has stood still for so long."""
        self.say(self._daemon(name), m.Heartbeat(1, [], [(self.mid(name), seconds, state)]))

    def slow(
        self,
        name: str,
        *,
        ops: bool = True,
        seq: int = 1,
        stage: str = "moving",
        age: float = 2.0,
        still: float = 0.1,
        since: float = 1.5,
        heard: float = 1.5,
        reason: str = "",
        **links: str,
    ) -> None:
        """The member says that an operation of it (if *ops*) is slow, and in what state its links are."""
        found = [m.OpWait(seq, "all_reduce(10 x float32, op=sum)", 40, stage, age, still)] if ops else []
        seen = [m.LinkWait(self.mid(other), False, at, since, heard, 100, reason) for other, at in links.items()]
        self.say(self._daemon(name), m.Waits(GROUP, self.mid(name), self.epoch, found, seen))
        label = self._label(self.conns[self._daemon(name)])
        usual = m.Waited(GROUP, self.mid(name), self.epoch, seq if ops else 0, "", [])
        self._leave_out(f"{label} < {self._text(usual, [usual.to])}", "Waited")

    # ---- what can be asked for with ? ----------------------------------------------------------------

    @property
    def waiting(self) -> str:
        """What the group waits for, as `wancoll status` says it."""
        return report.groups(self.state, self.now)[0].waiting_for

    @property
    def gone(self) -> list[Any]:
        """Groups that were running before this master, and who of them may still run."""
        return list(report.gone(self.state))

    @property
    def waits(self) -> list[str]:
        """What its slow operations wait for, as `wancoll status` says it."""
        found = report.groups(self.state, self.now)[0].waits
        said = [(f"seq {wait.seq}, {wait.nbytes} bytes, ", *wait_lines(wait)) for wait in found]
        return [line for head, first, *causes in said for line in (head + first, *causes)]

    @property
    def pairs(self) -> list[str]:
        """Who could not reach whom, and what was done."""
        found = report.groups(self.state, self.now)[0].pairs
        return [
            f"{one.source} -> {one.target}: {one.kind} {one.times} times in {one.seconds:.3g} s, "
            f"last {one.last:.3g} s ago; {one.done}; {one.why}"
            for one in found
        ]

    @property
    def status(self) -> list[str]:
        """The group and its members."""
        found = report.groups(self.state, self.now)[0]
        members = [f"{one.name}: {one.state}, rank {one.rank}, done up to {one.done_upto}" for one in found.members]
        return [f"{found.phase}, min_world={found.min_world}, committed up to {found.committed_upto}", *members]

    # ---- telling -------------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        for daemon, conn in self.conns.items():
            if conn not in self._labels:
                same = sum(label.rstrip("'") == daemon for label in self._labels.values())
                self._labels[conn] = daemon + "'" * same
        beat = event.message if isinstance(event, Received) and isinstance(event.message, m.Heartbeat) else None
        self._number = beat.number if beat else 0
        super().step(event)
        self._newest = max(self._newest, *self.state.members, 0)
        told = [f"{self._label(one.conn)} < its status" for one in self.ready.answers if not isinstance(one, Send)]
        sends = [one for one in [*self.ready.answers, *self.ready.messages] if isinstance(one, Send)]
        said = [*(one for one in self.ready.answers if isinstance(one, Send)), *self.ready.messages]
        self._logged = []
        told += self._lines([one for one in said if not self._is_usual(one)])
        answered = {one.conn for one in sends if isinstance(one.message, m.EvictAnswer)}
        told += [f"connection {conn} stays open" for conn in answered - {one.conn for one in self.ready.closes}]
        fates = {(one.conn, one.message.reason) for one in sends if isinstance(one.message, m.Evicted)}
        for one in self.ready.closes:
            if (one.conn in answered and not one.reason) or (not one.final and (one.conn, one.reason) in fates):
                continue  # as it should be, or said with the fate of its member
            how = " for good" if one.final else ""
            told.append(f"{self._label(one.conn)} closed{how}: {one.reason}".rstrip())
        usual = [found for found in map(self._usual_log, self._told_now()) if found] + self._usual_of(event)
        for one in self.ready.log:
            if one in self._logged:
                continue
            if (one.kind, one.text) in usual:
                usual.remove((one.kind, one.text))
                continue
            told.append(f"{'log' if one.kept else 'note'}{_group(one.group)} {one.kind}: {self._short(one.text)}")
        if self._verb in ("hello", "returns") and not any(isinstance(one.message, m.Welcome) for one in sends):
            told.append("no Welcome")
        if beat and self._verb == "say" and not any(isinstance(one.message, m.Pong) for one in sends):
            told.append("no Pong")
        told += [f"no log {kind}" for kind, _ in usual if kind not in {one.kind for one in self.ready.log}]
        at = f"+{self.now - self._began:.4g} " if self.now > self._began + 1e-9 else ""
        self._told += [at + line for line in told]

    def _leave_out(self, usual: str, *kinds: str) -> None:
        """Do not tell the *usual* line; tell if nothing of these kinds was told instead."""
        if usual in self._told:
            self._told.remove(usual)
        elif not any(kind in line for kind in kinds for line in self._told):
            self._told.append(f"no {kinds[0]}")

    def _is_usual(self, message: Message) -> bool:
        """Whether it is an answer that always comes."""
        match message:
            case Send(_, m.Pong() as pong):
                said = self._text(pong) == f"Pong(number={self._number})"
                return said or self._verb in ("sleep", "lose", "beat", "beats")
            case Send(_, m.Welcome() as welcome):
                back = ", resumed=True, heard=1" if self._verb == "returns" else ""
                usual = f"Welcome(term={self.state.term}{back})"
                return self._verb in ("hello", "returns") and self._text(welcome) == usual
        return False

    def _lines(self, messages: list[Message]) -> list[str]:
        """One line for each message; equal ones in a row share it, and so do probes."""
        found: list[tuple[str, str]] = []  # what the line begins with, and what was said
        probes = [one.message for one in messages if isinstance(one, Send) and isinstance(one.message, m.Probe)]
        joined = [one.message for one in messages if isinstance(one, Send) and isinstance(one.message, m.Joined)]
        meshed = {
            one.mid for one in joined if self._all_probe(one, [probe for probe in probes if probe.joiner == one.mid])
        }
        for message in messages:
            match message:
                case Send(_, m.Probe(joiner=mid)) if mid in meshed:
                    continue
                case Send(_, m.Probe() as probe) if self._is_plain(probe):
                    who = f" of {probe.joiner}" if probe.joiner else ""
                    whom, said = f"{self._label(message.conn)} -> {probe.daemon}", f"Probe{who}"
                case Send(conn, what):
                    whom, said = self._label(conn), self._text(what, self._mids(conn))
                    if isinstance(what, m.Joined) and what.mid in meshed:
                        said += ", all probe"
                    if isinstance(what, m.Evicted) and Close(conn, what.reason) in self.ready.closes:
                        said += ", and closed"
                case Broadcast(conns, what):
                    whom, said = " ".join(map(self._label, conns)), self._text(what) + self._log_of(what)
                case Announce(to, epoch, _):
                    whom, said = " ".join(self._label(conn) for conn, _ in to), self._text(epoch) + self._log_of(epoch)
            if found and isinstance(message, Send) and found[-1][1] == said:
                found[-1] = f"{found[-1][0]}, {whom}", said
            else:
                found.append((whom, said))
        return [f"{said}: {whom}" if " -> " in whom else f"{whom} < {said}" for whom, said in found]

    def _log_of(self, told: m.FromMaster) -> str:
        """What the event log calls the reason of the message, if it says the same."""
        same = [one for one in self.ready.log if one.kept and one.text == getattr(told, "reason", "")]
        self._logged += same
        return "".join(f", log {one.kind}" for one in same)

    def _mids(self, conn: int) -> list[int]:
        """Members of the connection's daemon."""
        return [mid for mid, member in self.state.members.items() if member.daemon.conn == conn]

    def _all_probe(self, joined: m.Joined, probes: list[m.Probe]) -> bool:
        """Whether the probes are of the joiner to each member of its group, and of each member to the joiner."""
        group = self.state.groups.get(joined.group)
        mids = [one.mid for one in group.members] if group else []
        pairs = {(one.prober, one.target) for one in probes}
        return (
            bool(probes)
            and all(map(self._is_plain, probes))
            and len(probes) == len(pairs)
            and pairs == {pair for mid in mids for pair in ((mid, joined.mid), (joined.mid, mid))}
        )

    def _is_plain(self, probe: m.Probe) -> bool:
        """Whether the daemons' names say all of the probe."""
        ends = [self.state.members.get(mid) for mid in (probe.prober, probe.target)]
        alone = all(end and sum(one.daemon is end.daemon for one in self.state.members.values()) == 1 for end in ends)
        return alone and probe.group == GROUP and probe.addresses == [f"{probe.daemon}:7000"]

    def _told_now(self) -> list[tuple[Daemon | None, Any]]:
        """What daemons were told in this step; None: what all members were told."""
        by_conn = {one.conn: one for one in self.state.daemons.values()}
        sends = [one for one in [*self.ready.answers, *self.ready.messages] if isinstance(one, Send)]
        told = [(by_conn[one.conn], one.message) for one in sends if one.conn in by_conn]
        return [*told, *((None, one.epoch) for one in self.ready.messages if isinstance(one, Announce))]

    def _usual_log(self, told: tuple[Daemon | None, Any]) -> tuple[str, str] | None:
        """The line of the event log that goes with a message: its kind and text."""
        match told:
            case None, m.Epoch(members=members, reason=reason):
                return "epoch", f"{reason}; {counted(len(members), 'member')}: {names(members)}"
            case Daemon(name=name), m.Joined(member=member, mid=mid, reason=reason):
                return "joined", f"{member} of daemon {name} as {mid}; {reason}"
            case Daemon(name=name), m.Refused(member=member, reason=reason):
                return "refused", f"{member} of daemon {name}: {reason}"
            case Daemon(), m.Resumed(group=group, epoch=epoch):
                members = names(self.state.groups[group].members)
                return "resumed", f"the master was restarted; epoch {epoch} goes on with {members}"
            case Daemon(name=name), m.Welcome(resumed=True) if name in self._broke:
                return "back", f"daemon {name} is back after {self.now - self._broke[name]:.1f} s, and goes on"
            case Daemon(name=name, addresses=addresses), m.Welcome(resumed=False):
                return "daemon", f"daemon {name} is here, version 0.1.0, lanes at {', '.join(addresses)}"
        return None

    def _usual_of(self, event: Event) -> list[tuple[str, str]]:
        """The line of the event log that goes with a connection that has broken."""
        match event:
            case Disconnected(conn=conn, reason=reason, lasting=False) if conn in self._labels:
                name = self._labels[conn].rstrip("'")
                self._broke[name] = self.now
                within = f"it may come back within {self.state.limits.return_grace:.3g} s"
                return [("away", f"daemon {name}: {reason}; {within}")]
        return []

    def _short(self, text: str) -> str:
        """The text, with ... for what a message of the same step has said."""
        for told in self.ready.messages:
            if reason := getattr(told.epoch if isinstance(told, Announce) else told.message, "reason", ""):
                text = text.replace(reason, "...")
        return text

    def _label(self, conn: int) -> str:
        return self._labels.get(conn, f"connection {conn}")

    def _text(self, value: Any, mids: Sequence[int] = ()) -> str:
        """The value, for a daemon that has the members *mids*."""
        if isinstance(value, m.MemberInfo):
            where = "" if value.addresses == [f"{value.daemon}:7000"] else f" at {','.join(value.addresses)}"
            return f"{value.mid}:{value.name}@{value.daemon}{where}" + (f" in {value.site}" if value.site else "")
        if isinstance(value, list):
            return "[" + ", ".join(map(self._text, value)) + "]"
        if isinstance(value, float):
            return f"{value:.6g}"
        if not isinstance(value, msgspec.Struct):
            return repr(value)
        fields, defaults = value.__struct_fields__, value.__struct_defaults__
        usual = dict(zip(fields[len(fields) - len(defaults) :], defaults, strict=True))
        usual |= {"group": GROUP, "term": self.state.term, "protocol": PROTOCOL_VERSION}
        usual |= {"voids": [], "digests": [], "goodbyes": []}
        if len(mids) == 1 and isinstance(value, m.ForMember | m.Updated):
            usual |= {"to": mids[0]}
        if isinstance(value, m.Plan):
            usual = msgspec.structs.asdict(USUAL)
        elif isinstance(value, m.Welcome):
            usual = {name: getattr(self.limits, name) for name in ("heartbeat_interval", "heartbeat_timeout")}
            usual |= {"protocol": PROTOCOL_VERSION, "session": value.session, "resumed": False, "heard": 0}
            usual |= {"elected_by": ""}
        elif isinstance(value, m.Pong):
            usual |= {"heard": value.heard, "clock": value.clock}
        elif isinstance(value, m.Epoch):
            collectors = "members" if self.limits.voters else USUAL.collectors
            usual |= {"plan": msgspec.structs.replace(USUAL, collectors=collectors), "to": value.to, "min_world": 1}
        said = []
        for name in fields:
            found = getattr(value, name)
            if name == "key" and found:  # of an epoch: in clear daemons have none
                if found not in self._keys:
                    self._keys.append(found)
                if self._keys.index(found):
                    said.append(f"key=#{self._keys.index(found)}")
            elif name == "master":
                assert found in (0, self.state.identity)
            elif name not in usual or found != usual[name]:
                said.append(f"{name}={self._text(found)}")
        return f"{type(value).__name__}({', '.join(said)})"


def _group(name: str) -> str:
    return "" if name in ("", GROUP) else f" of {name}"

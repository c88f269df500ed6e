"""What must be true, looked at whenever a master decides, a member speaks and a client is told something.

The promise (ARCHITECTURE.md) and R1 to R8 of docs/protocol.md. Members are called by their clients' names, which are
never used again; a *life* is a group's history from its first epoch to the loss of its last member.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sim.client import Called, Client, block, index_of, island_of, shard_of
from tests.sim.client import value as _value
from wancoll.collective import ROOTED, SAME_RESULT, Descriptor, Kind, same_kind
from wancoll.wire import messages as m
from wancoll.wire.islands import in_order
from wancoll.wire.note import unpack
from wancoll_master.core.ready import Announce, Broadcast, Send

if TYPE_CHECKING:
    from tests.sim.world import World

# What a call may end in that says that it has not happened. All else is OutcomeUnknown.
_BY_ITSELF = {"OperationAborted", "WorldTooSmall", "CollectiveMismatch", "ProtocolError"}
_BY_THE_END = {"Evicted", "MasterUnreachable", "PeerDaemonLost", "AskedToLeave", "ConfigError"}
DEFINITE = frozenset(_BY_ITSELF | _BY_THE_END)

_NEVER = float("inf")
_UPDATE = Descriptor(Kind.update_membership).fingerprint()


class Violation(AssertionError):
    """Something that must be true is not."""


class Judge:
    """See the module."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.entered: dict[str, int] = {}  # newest epoch of each member
        self.epochs: dict[tuple[int, tuple[str, ...]], m.Epoch] = {}  # as announced, by number and members
        self._of_master: dict[tuple[str, int], m.Epoch] = {}  # epochs that a master began
        self._forgotten: set[int] = set()  # lives of which a journal knew that was lost
        self.lives: dict[str, int] = {}  # by name and mid: one that had not heard of its epoch joins again
        self._numbers: dict[tuple[int, int], tuple[str, ...]] = {}  # (life, epoch) -> members
        self._given: dict[int, tuple[str, ...]] = {}  # epoch -> members, of all lives
        self._keys: dict[str, str] = {}  # name -> name and mid, of those that entered an epoch
        self.given_up: set[tuple[int, int]] = set()  # (life, seq) that a master has said to be void
        self.done: dict[tuple[str, int, int], tuple[int, int]] = {}  # (member, epoch, seq) -> digest, fingerprint
        self.told_commit: dict[int, int] = {}  # by life: up to where a master has committed
        self._decided: dict[tuple[int, int], int] = {}  # (term, life) -> the same, by that master
        self._committed_in: dict[tuple[int, int], set[int]] = {}  # (life, seq) -> epochs, one for each master
        self.voids: dict[tuple[int, int], dict[str, str]] = {}  # (life, seq) -> member -> why, as it was told
        self.heard_void: dict[tuple[int, int], set[str]] = {}  # by whom; it may have died with the master that said so
        self.outcomes: dict[tuple[int, int], tuple[tuple[str, ...], int, Any]] = {}  # islands, epoch, kind
        self._values: dict[tuple[int, int, int], Any] = {}  # (life, seq, column) -> the bytes that are the same
        self.refused: dict[tuple[int, int], dict[str, str]] = {}  # (life, seq) -> member -> definite failure
        self.posted: dict[tuple[str, int], Called] = {}
        self._results: set[tuple[str, int]] = set()  # (member, seq)
        self._covered: set[tuple[str, int]] = set()  # (member, seq) in which its daemon took part with zeros (R20)
        self.flipped: set[tuple[str, int, int]] = set()  # (member, epoch, seq) whose result is not what it should be
        self._alone: set[tuple[int, int]] = set()  # (life, seq) committed by the word of the one member that is left
        self.sent: dict[tuple[str, str, int], tuple[int, ...]] = {}  # (from, to, tag) -> the bytes
        self.exchanged: dict[tuple[str, str, int], dict[str, str]] = {}  # the same -> member -> how it ended
        self.updates: dict[tuple[int, int], dict[str, tuple[int, tuple[str, ...]]]] = {}  # member -> epoch, members
        self.results = self.failures = self.unknown = 0
        self._out: dict[
            str, int
        ] = {}  # up to where an operation may have happened, by the word that put the member out
        self._begun: set[tuple[str, int, int]] = set()  # (member, epoch, seq) that an engine has run
        self.needless = 0  # calls that end as unknown, and could not have happened
        self.alone = 0  # update_memberships that ended without a master (C11)
        self.errors: dict[str, int] = {}

    @property
    def forgotten(self) -> bool:
        """Whether a journal was lost that knew of a group."""
        return bool(self._forgotten)

    def check(self, true: bool, text: str) -> None:
        if not true:
            raise Violation(text)

    # ---- masters -------------------------------------------------------------------------------------

    def forgets(self, *, all_of_it: bool) -> None:
        """The masters' journal is lost, or a part: what the documents promise of the groups that it knew is less."""
        self._forgotten = set(self.lives.values())
        if all_of_it:  # a master that meets nobody of before begins to count anew
            self._given.clear()

    def decides(self, master: str, command: Any) -> None:
        if not self._world.journal.missed:  # else the next master knows that it lacks something
            self._is_durable(master, command)
        match command:
            case Announce(_, epoch, _):
                self._announced(master, epoch)
                self._of_master[master, epoch.epoch] = epoch
            case Broadcast(_, m.Commit() as commit):
                self._committed(master, commit)

    def _is_durable(self, master: str, command: Any) -> None:
        """R9: what a later master has to know is in the journal when it is told."""
        journal = self._world.journal
        known = journal.used.get(self._world.group)
        match command:
            case Announce(_, epoch, _):
                mids = {member.mid for member in epoch.members}
                durable = known is not None and known.epoch >= epoch.epoch and max(mids) < journal.next_mid
            case Send(_, m.Joined(mid=mid)):
                durable = mid < journal.next_mid
            case Send(_, m.Evicted(reason=reason)) if reason.startswith("the group forms anew"):
                durable = True  # of a group that this master knows nothing of; when it was decided nobody had come
            case Send(_, m.Evicted()) if known is None and self._forgotten:
                durable = True  # the group was lost with the journal, and no epoch of it was told since
            case Send(conn, m.Evicted(mid=mid)) if self._world.members_at(master):
                durable = known is not None and (mid not in known.mids or self._world.all_out(master, known.mids))
                durable = durable or self._world.another_has(master, conn, mid)
            case _:
                durable = True
        if not durable:
            raise Violation(f"{master} says what the journal does not know: {command}, {journal}")

    def _announced(self, master: str, epoch: m.Epoch) -> None:
        names = tuple(member.name for member in epoch.members)
        if not (len(set(names)) == len(names)):
            raise Violation(f"epoch {epoch.epoch} has a member twice: {names}")
        if epoch.shards != self._world.shards or not in_order(names, epoch.shards):
            raise Violation(f"epoch {epoch.epoch} has a part of an island: {names}")
        keys = [_key(member.name, member.mid) for member in epoch.members]
        known = {self.lives[key] for key in keys if key in self.lives}
        if not (len(known) <= 1):
            raise Violation(f"epoch {epoch.epoch} joins members of two histories: {names}")
        if not known:
            self._may_begin(master)
        life = known.pop() if known else len(set(self.lives.values()))
        for key in keys:
            self.lives.setdefault(key, life)
        known_epoch = self.epochs.setdefault((epoch.epoch, names), epoch)
        if not ((known_epoch.committed_upto, known_epoch.key) == (epoch.committed_upto, epoch.key)):
            raise Violation(f"epoch {epoch.epoch} was announced twice, differently")
        known_names = self._numbers.setdefault((life, epoch.epoch), names)
        if not (known_names == self._given.setdefault(epoch.epoch, names) == names):
            raise Violation(f"epoch {epoch.epoch} of {self._given[epoch.epoch]} is used again, for {names}")
        self.given_up |= {(life, void.seq) for void in epoch.voids}
        if len(names) == epoch.shards:
            self._alone |= {(life, seq) for seq in range(self.told_commit.get(life, 0) + 1, epoch.committed_upto + 1)}
        if epoch.passed:  # in the epoch before (C11)
            before = sorted(number for of, number in self._numbers if of == life and number < epoch.epoch)
            # The newest one may have been heard by nobody who goes on, if it was lost with the journal.
            before = before if life in self._forgotten else before[-1:] or [0]
            for seq in range(self._decided.get((epoch.term, life), 0) + 1, epoch.committed_upto + 1):
                self._committed_in.setdefault((life, seq), set()).update(before)
        self._rises(life, epoch.term, epoch.epoch, epoch.committed_upto)

    def _may_begin(self, name: str) -> None:
        """R7: under a master that may not be the first the group forms only when its members could have reported."""
        master = next(one for one in self._world.masters if one.name == name)
        waited = self._world.clock.now - master.led_at
        if master.holds and waited < self._world.limits.rejoin_grace - 1e-6:
            raise Violation(f"{name} forms a group {waited:.3f} s after its start, and may not be the first master")

    def _life(self, name: str) -> int:
        return self.lives[self._keys[name]]

    def _rises(self, life: int, term: int, epoch: int, upto: int) -> None:
        for seq in range(self._decided.get((term, life), 0) + 1, upto + 1):
            self._committed_in.setdefault((life, seq), set()).add(epoch)
        self._decided[term, life] = max(self._decided.get((term, life), 0), upto)
        self.told_commit[life] = max(self.told_commit.get(life, 0), upto)

    def _committed(self, master: str, commit: m.Commit) -> None:
        """R1: all members of the epoch are done, with equal digests."""
        epoch, present = self._of_master.get((master, commit.epoch)), self._world.members_at(master)
        if epoch is None or [member.name for member in epoch.members] != present:
            # An earlier one's, that goes on; where a journal was lost numbers may be those of two.
            found = [epoch for (number, _), epoch in self.epochs.items() if number == commit.epoch]
            last = epoch or found[-1]
            epoch = next((one for one in found if [member.name for member in one.members] == present), last)
        names = [member.name for member in epoch.members]
        life = self.lives[_key(names[0], epoch.members[0].mid)]
        for seq in range(self.told_commit.get(life, 0) + 1, commit.upto + 1):
            if (life, seq) in self.given_up:
                continue
            done = [self.done.get((name, commit.epoch, seq)) for name in names]
            if not (None not in done):
                raise Violation(f"op {seq} is committed in epoch {commit.epoch}, done are {names}: {done}")
            if not self._equal(dict(zip(names, done, strict=True))):
                raise Violation(f"op {seq} is committed in epoch {commit.epoch}; digests of {names}: {done}")
        self._rises(life, commit.term, commit.epoch, commit.upto)

    # ---- members -------------------------------------------------------------------------------------

    def enters(self, name: str, epoch: m.Epoch) -> None:
        """R2, R14: epochs only grow, and what they void stays so."""
        if not (epoch.epoch > self.entered.get(name, 0)):
            raise Violation(f"{name} goes back to epoch {epoch.epoch}")
        self.entered[name] = epoch.epoch
        self._keys[name] = _key(name, epoch.to)
        life = self._life(name)
        self._updates_agree(life)
        for void in epoch.voids:
            known = self.voids.setdefault((life, void.seq), {})
            known[name] = void.error
            here = {known[member.name] for member in epoch.members if member.name in known}
            if (
                len(here if life in self._forgotten else set(known.values())) > 1
            ):  # R14: the journal knows what was told
                raise Violation(f"op {void.seq} is void for two reasons: {known}")
            if void.error == "OutcomeUnknown":
                continue  # the one error that does not say that it has not happened
            outcome = self.outcomes.get((life, void.seq))
            self.heard_void.setdefault((life, void.seq), set()).add(name)
            if outcome is not None and island_of(name) in outcome[0]:
                raise Violation(f"op {void.seq} is void in epoch {epoch.epoch} and was committed: {outcome}")

    def says(self, member: Any, message: m.FromPeer) -> None:
        """What a member tells a master."""
        match message:
            case m.Vote(_, _, epoch, seq, digest, fingerprint):
                self._done(member.name, epoch, seq, (digest, fingerprint))
            case m.Report(finished=finished, epoch=epoch) | m.Frozen(finished=finished, epoch=epoch):
                for seq, digest, fingerprint in finished.done:
                    self._done(member.name, epoch, seq, (digest, fingerprint))

    def notes(self, member: Any, note: bytes) -> None:
        """What a member tells the others."""
        said = unpack(note, member.group, member.mid)
        tally = member.collectives.tally
        # One whose calls have ended may still be heard: their outcome is unknown, and none has been denied (R8).
        if not member.over and (tally is None or tally.frozen):
            raise Violation(f"{member.name} is frozen and says {said} (C2)")
        if isinstance(said, m.Vote) and said.seq:
            self._done(member.name, said.epoch, said.seq, (said.digest, said.fingerprint))

    def counts(self, member: Any) -> None:
        """C1: where members commit, what one takes for committed all have finished, equally."""
        tally = member.collectives.tally
        if member.view is None or tally is None or member.name not in self._keys:
            return
        life = self._life(member.name)
        before = self.told_commit.get(life, 0)
        if tally.committed <= before:
            return
        names = [one.name for one in member.view.epoch.members]
        for seq in range(before + 1, tally.committed + 1):
            keys = [(name, tally.epoch, seq) for name in names]
            # It has finished it itself, and says so in no note where no link is up.
            done = {key[0]: self.done.get(key) for key in keys if key in self.done or key[0] != member.name}
            if (life, seq) not in self.given_up and len(names) > 1 and not self._equal(done):
                raise Violation(f"{member.name} commits op {seq} of epoch {tally.epoch}; done are {names}: {done}")
            self._committed_in.setdefault((life, seq), set()).add(tally.epoch)
        newest = max(self.lives.values())
        if life < newest and life not in self._forgotten:
            raise Violation(f"{member.name} commits op {tally.committed} beside another group of that name (C8)")
        self.told_commit[life] = tally.committed

    def _equal(self, done: dict[str, tuple[int, int] | None]) -> bool:
        """Whether all have finished it: with the same result within a column, and with calls of one kind."""
        found = {(shard_of(name), one) for name, one in done.items()}
        columns = {shard for shard, _ in found}
        prints = [one[1] for _, one in found if one is not None]
        alike = all(same_kind(one or _UPDATE, prints[0] or _UPDATE) for one in prints)
        return len(found) == len(columns) and alike and all(one is not None for _, one in found)

    def contributes_zeros(self, name: str, seq: int, grace: float) -> None:
        """R20: the daemon of *name* takes part for it: not before another has called it for so long."""
        self._covered.add((name, seq))
        first = min((called.at for (_, at), called in self.posted.items() if at == seq), default=_NEVER)
        if self._world.clock.now < first + grace - 1e-6:
            raise Violation(f"the daemon of {name} takes part in op {seq}, first called at {first}")

    def _done(self, name: str, epoch: int, seq: int, what: tuple[int, int]) -> None:
        what = (0, 0) if what[1] == _UPDATE else what
        known = self.done.setdefault((name, epoch, seq), what)
        if not (known == what):
            raise Violation(f"{name} is done with op {seq} of epoch {epoch} twice, differently")

    # ---- clients -------------------------------------------------------------------------------------

    def calls(self, client: Client, called: Called) -> None:
        if called.seq:
            self.posted[client.name, called.seq] = called
        elif called.what.kind is Kind.send:
            self.sent[client.name, called.other, called.tag] = called.before

    def ends(self, client: Client, called: Called, message: m.Result | m.Failure) -> None:
        """A call has ended; the only time that it does."""
        if not (tuple(called.input_buffer) == called.before):
            raise Violation(f"{client.name}: the input of op {called.seq} was written")
        if not called.seq:
            self._exchange_ends(client, called, message)
        elif isinstance(message, m.Result):
            self.results += 1
            self._result(client, called, message)
        else:
            self._failure(client, called, message)

    def _result(self, client: Client, called: Called, result: m.Result) -> None:
        name, seq = client.name, called.seq
        if not (result.seq == seq):
            raise Violation(f"{name} is told of op {result.seq} for op {seq}")
        life = self._life(name)
        if not (seq <= self.told_commit.get(life, 0)):
            raise Violation(f"{name} has a result of op {seq} before any commit (R3)")
        names = tuple(result.contributors)
        if name not in names:
            raise Violation(f"{name} has a result of op {seq} without itself: {names}")
        if called.what.kind is Kind.update_membership:
            self.alone += not result.asked_master
            self._update_ends(name, life, seq, (result.epoch, tuple(map(island_of, names))))
            return
        islands = tuple(map(island_of, names))
        all_shards = [f"{one}/{k}" for one in islands for k in range(self._world.shards)]
        everyone = names if self._world.shards == 1 else all_shards
        heard = self.heard_void.get((life, seq), set()) & set(everyone)
        if heard:
            raise Violation(f"{name} has a result of op {seq} over {names}, void for {heard}")
        if (name, result.epoch, seq) in self.flipped and (life, seq) in self._alone:
            return  # corrupted unseen, and nobody is left whose digest differs: "What does not hold yet"
        names_in = self._counted(name, called, result, names)
        want = self._expected(called.what, called.root, seq, name, names_in)
        if called.result_buffer != want:
            raise Violation(f"{name}: op {seq} over {names} is {called.result_buffer}, expected {want}")
        same = tuple(called.result_buffer) if called.what.kind in SAME_RESULT else ()
        outcome = (islands, result.epoch, called.what.kind)
        known = self.outcomes.setdefault((life, seq), outcome)
        known_same = self._values.setdefault((life, seq, shard_of(name)), same)
        if known != outcome or known_same != same:
            raise Violation(f"op {seq} has two outcomes: {known}, {known_same}, and {outcome}, {same} for {name}")
        for other in everyone:
            error = self.refused.get((life, seq), {}).get(other)
            if error is not None:
                raise Violation(f"op {seq} is committed with {other}, who was told {error}")
            theirs = self.posted.get((other, seq))
            if (other, seq) in self._covered:
                continue  # nobody has seen what it calls
            if theirs is not None and shard_of(other) != shard_of(name):
                if theirs.what.kind is not called.what.kind and (other, seq) in self._results:
                    raise Violation(f"op {seq}: {other} called {theirs.what}, {name} {called.what}")
            elif theirs is not None and (_needs_all(called.what) or (other, seq) in self._results):
                both = _plain(theirs), _plain(called)
                if not (both[0] == both[1]):
                    raise Violation(f"op {seq}: {other} called {both[0]}, {name} {both[1]}")
        held = (called.root, result.epoch, seq) in self.done or called.what.kind not in (Kind.reduce, Kind.gather)
        if not held and self._world.masters_started == 1:  # else R7 may let it: nobody can know
            raise Violation(f"op {seq} is committed, and its root {called.root} has not finished it")
        self._results.add((name, seq))

    def _counted(self, name: str, called: Called, result: m.Result, names: tuple[str, ...]) -> tuple[str, ...]:
        """R20: whose tensors are in the result. Each contributor's, but of those whose daemons took part for them."""
        seq = called.seq
        if not result.counted and (name, seq) not in self._covered:
            raise Violation(f"{name} is told that op {seq} does not count it, and its daemon took no part for it")
        if called.what.kind is not Kind.all_reduce or not called.result_buffer:
            return names
        held = tuple(one for one in names if called.result_buffer[0] // 10 ** index_of(one) % 10)
        if (name in held) != result.counted:
            raise Violation(f"{name} is told counted={result.counted} of op {seq}, which holds {held}")
        for one in names:
            if one not in held and (one, seq) not in self._covered:
                raise Violation(f"op {seq} over {names} holds {held} only")
        return held

    def _update_ends(self, name: str, life: int, seq: int, outcome: tuple[int, tuple[str, ...]]) -> None:
        """R5: in the epoch in which it was committed, and alike for all who go on.

        Who was told and is lost with the master tells nobody.
        """
        epochs = self._committed_in.get((life, seq), set())
        if outcome[0] not in epochs:
            raise Violation(f"{name}: update {seq} ends in epoch {outcome[0]}; it was committed in {epochs}")
        self.updates.setdefault((life, seq), {})[name] = outcome
        self._updates_agree(life)

    def _updates_agree(self, life: int) -> None:
        """Who goes on has come to the newest epoch that one ended in; who has not may be out already."""
        for (of_life, seq), known in self.updates.items():
            newest = max(known.values())
            for other, theirs in known.items():
                goes_on = of_life == life and island_of(other) in newest[1] and self.entered[other] >= newest[0]
                if goes_on and theirs != newest:
                    raise Violation(f"update {seq} ends in {theirs} for {other}, in {newest} for others")

    def _expected(self, what: Descriptor, root: str, seq: int, name: str, names: tuple[str, ...]) -> list[int]:
        """What *name* has to have, by its program's word: blocks are those of the contributors, in their order."""
        if what.kind in ROOTED and root not in names:
            raise Violation(f"op {seq}: the root {root} is not among {names}")
        me, source, indices = index_of(name), index_of(root or name), [index_of(one) for one in names]
        value = partial(_value, shard=shard_of(name))
        mine = range(block(what, me))
        match what.kind:
            case Kind.all_reduce | Kind.reduce:
                here = what.kind is Kind.all_reduce or name == root
                return [sum(value(index, seq, place) for index in indices) for place in mine] if here else []
            case Kind.all_gather | Kind.gather:
                here = what.kind is Kind.all_gather or name == root
                return [value(one, seq, place) for one in indices if here for place in range(block(what, one))]
            case Kind.broadcast:
                return [value(source, seq, place) for place in mine]
            case Kind.reduce_scatter:
                return [sum(value(index, seq, place, me) for index in indices) for place in mine]
            case Kind.scatter:
                return [value(source, seq, place, me) for place in mine]
            case Kind.all_to_all:
                return [value(index, seq, place, me) for index in indices for place in mine]
        return []

    def _failure(self, client: Client, called: Called, failure: m.Failure) -> None:
        name, seq, error = client.name, called.seq, failure.error
        self.failures += 1
        self.errors[error] = self.errors.get(error, 0) + 1
        if error not in DEFINITE | {"OutcomeUnknown"}:
            raise Violation(f"{name}: op {seq} ends in {failure}")
        self._world.judge_failure(client, called, failure)
        if error == "OutcomeUnknown":
            self.unknown += 1
            self._is_needed(name, called, failure)
        if error == "CollectiveMismatch" and (name, seq) in self._covered:
            return  # late, and alone with what it calls: the others' operation has happened without its tensor
        if error in DEFINITE and called.what.kind is not Kind.update_membership:
            life = self._life(name)
            self.refused.setdefault((life, seq), {})[name] = error
            outcome = self.outcomes.get((life, seq))
            if not (outcome is None or island_of(name) not in outcome[0]):
                raise Violation(f"{name} is told {error} for op {seq}, committed with it: {outcome}")

    def begins(self, member: Any, seq: int) -> None:
        """Its engine runs the operation in the member's epoch."""
        self._begun.add((member.name, member.epoch_number, seq))

    def evicts(self, member: Any, told: m.Evicted) -> None:
        """R8: the member hears that it is out, and what may have happened."""
        self._out[member.name] = max(told.committed_upto, told.unknown_upto)

    def _is_needed(self, name: str, called: Called, failure: m.Failure) -> None:
        """R8: nobody is left in doubt about what the master has decided, or what no engine here has begun."""
        if failure.cause in ("", "PeerDaemonLost"):
            return  # it is so for the whole group, or nobody was left to say more
        assert called.posted is not None
        # A member with an empty block finishes without this one, so a new master may commit what it reports (R7).
        begun = (name, self.entered[name], called.seq) in self._begun or not called.posted.proves_all
        self.needless += not begun or called.seq > self._out.get(name, called.seq)
        if self.needless:
            raise Violation(f"{name}: op {called.seq} has not happened, and is told to be unknown: {failure}")

    def _exchange_ends(self, client: Client, called: Called, message: m.Result | m.Failure) -> None:
        name, sends = client.name, called.what.kind is Kind.send
        key = (name, called.other, called.tag) if sends else (called.other, name, called.tag)
        how = "" if isinstance(message, m.Result) else message.error
        told = self.exchanged.setdefault(key, {})
        if not (name not in told):
            raise Violation(f"{name}: exchange {key} ends twice")
        told[name] = how
        if isinstance(message, m.Result) and not sends and tuple(called.result_buffer) != self.sent[key]:
            raise Violation(f"exchange {key}: {called.result_buffer}, sent was {self.sent[key]}")
        definite = {other: error for other, error in told.items() if error in DEFINITE}
        if not (not definite or "" not in told.values()):
            raise Violation(f"exchange {key} ends in {told}")
        if isinstance(message, m.Failure):
            self.errors[how] = self.errors.get(how, 0) + 1

    def out(self, client: Client, failure: m.Failure) -> None:
        """The member as a whole is out."""
        self._world.judge_out(client, failure)


def _key(name: str, mid: int) -> str:
    return f"{name}/{mid}"


def _needs_all(what: Descriptor) -> bool:
    """Whether a member cannot finish it without the others: only then does its end prove that they called the same."""
    return what.kind not in ROOTED and bool(what.count or any(what.counts))


def _plain(called: Called) -> tuple[Any, ...]:
    """What members must agree on, whatever ranks they know."""
    what = called.what
    return what.kind, what.count, what.counts, what.algorithm, what.on_failure, called.root

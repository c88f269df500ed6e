"""Which state wins, and whether the others can be brought to it. Pure: all members come to the same answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from wancoll.errors import ConfigError, OperationAborted, WancollError
from wancoll.sync.manifest import STRIPE, Content, Entry, Header, Stripe, Thing, stripe_count, stripes
from wancoll.sync.strategy import SEND_ONLY, SILENT

_CALL = "sync_state"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which state wins."""

    member: str  # the first in rank order that has it and votes
    revision: int  # of it
    holders: tuple[str, ...]  # names of all that have it and vote, in rank order
    differing: tuple[str, ...]  # names of the members that have another content, in rank order


@dataclass(frozen=True, slots=True)
class Goal:
    """What there is to move."""

    entries: tuple[Entry, ...]  # the tensors, which all members have alike
    stripes: tuple[Stripe, ...]  # their stripes
    digests: bytes  # of the winning state's stripes, 8 bytes each
    missing: Mapping[str, frozenset[int]]  # per member, the numbers of its stripes that differ
    silent: frozenset[str]  # members that send nothing
    things: tuple[Thing, ...] = ()  # of the winning state

    def digest(self, stripe: int) -> int:
        """The right one of a stripe."""
        return int.from_bytes(self.digests[8 * stripe : 8 * stripe + 8], "little")

    def tensors(self, missing: frozenset[int]) -> list[int]:
        """Which tensors these stripes are parts of, also those that share the memory."""
        changed = {self.stripes[number].entry for number in missing}
        return [i for i, entry in enumerate(self.entries) if (entry.shares if entry.shares >= 0 else i) in changed]

    def nbytes(self, numbers: frozenset[int] | Sequence[int]) -> int:
        """Size of these stripes."""
        return sum(self.stripes[number].nbytes for number in numbers)


def judge(headers: Mapping[str, Header]) -> Verdict:
    """The highest revision wins, among those the state of most members, among those that of the lowest rank.

    Raises ConfigError: nobody votes, or a member that may not be changed has another state.
    """
    voters = {name: header for name, header in headers.items() if header.strategy not in SILENT}
    if not voters:
        raise ConfigError(
            "no member's state can win", who=_CALL, expected="a member with another strategy",
            got=", ".join(f"{header.strategy!r} by {name}" for name, header in headers.items()),
        )  # fmt: skip
    revision = max(header.revision for header in voters.values())
    parties: dict[bytes, list[str]] = {}
    for name, header in voters.items():
        if header.revision == revision:
            parties.setdefault(header.fingerprint, []).append(name)
    won, party = max(parties.items(), key=lambda each: len(each[1]))  # of equals the first, so that of the lowest rank
    differing = tuple(name for name, header in headers.items() if header.fingerprint != won)
    for name in differing:
        if headers[name].strategy == SEND_ONLY:
            raise ConfigError(
                "the state of a member that may not be changed does not win", who=f"{name}, {_CALL}",
                expected=f"the state of {', '.join(party)}, revision {revision}",
                got=f"another one, revision {headers[name].revision}",
                hint=f"drop strategy={SEND_ONLY!r} there, or give its state the highest revision",
            )  # fmt: skip
    holders = tuple(name for name, header in voters.items() if header.fingerprint == won)
    return Verdict(party[0], revision, holders, differing)


def goal(verdict: Verdict, headers: Mapping[str, Header], contents: Mapping[str, Content]) -> Goal:
    """What every member lacks. Raises ConfigError: a member has other keys, shapes or dtypes than the winner."""
    won = contents[verdict.member]
    expected = _fixed(won)
    for name, content in contents.items():
        if [(thing.name, thing.loose) for thing in content.things] != [(each.name, each.loose) for each in won.things]:
            raise ConfigError(
                "passes other things", who=f"{name}, {_CALL}", expected=f"{_names(won)}, as on {verdict.member}",
                got=_names(content), hint="pass the same kinds of things, in the same order, on all members",
            )  # fmt: skip
        if content.entries != won.entries and (got := _fixed(content)) != expected:
            raise _misfit(verdict.member, expected, name, got)
    cut = tuple(stripes(won.entries))
    missing = {name: _lacking(content, won, cut) for name, content in contents.items()}
    silent = frozenset(name for name, header in headers.items() if header.strategy in SILENT)
    return Goal(won.entries, cut, won.digests, missing, silent, won.things)


def alike(one: Entry, other: Entry) -> bool:
    """Whether a tensor can take the other's bytes."""
    return replace(one, shares=-1) == replace(other, shares=-1)


def lost_holders(goal: Goal, stripe: int, who: str) -> OperationAborted:
    """The error where nobody is left that can send a stripe to *who*."""
    return OperationAborted(
        "nobody is left who could send a part of the state that won",
        who=f"{_CALL}, {who}",
        expected=f"a holder of {goal.entries[goal.stripes[stripe].entry].key!r}",
        got="none that can be reached",
        hint="all tensors are as they were; call sync_state again: the members that are left elect anew",
    )


def _names(content: Content) -> str:
    return ", ".join(thing.name for thing in content.things) or "a plain mapping"


def _fixed(content: Content) -> tuple[Entry, ...]:
    """The tensors that all members must have alike, as if there were no others."""
    loose = [thing for thing in content.things if thing.loose]
    if not loose:
        return content.entries
    kept = [i for i, entry in enumerate(content.entries) if not any(thing.holds(entry) for thing in loose)]
    places = {i: place for place, i in enumerate(kept)}
    return tuple(replace(content.entries[i], shares=places.get(content.entries[i].shares, -1)) for i in kept)


def _lacking(content: Content, won: Content, cut: Sequence[Stripe]) -> frozenset[int]:
    """Numbers of the winner's stripes that a member does not have."""
    if content.entries == won.entries:
        return _differing(content.digests, won.digests, len(cut))
    mine: dict[str, tuple[Entry | None, int]] = {}  # with the number of its first stripe
    first = 0
    for entry in content.entries:
        if entry.shares < 0:
            mine[entry.key] = entry, first
            first += stripe_count(entry.nbytes)
    lacking = set()
    for number, stripe in enumerate(cut):
        right = won.entries[stripe.entry]
        held, first = mine.get(right.key, (None, 0))
        at = 8 * (first + stripe.offset // STRIPE)
        right_digest = won.digests[8 * number : 8 * number + 8]
        if held is None or not alike(held, right) or content.digests[at : at + 8] != right_digest:
            lacking.add(number)
    return frozenset(lacking)


def _differing(mine: bytes, right: bytes, count: int) -> frozenset[int]:
    if mine == right:
        return frozenset()
    return frozenset(i for i in range(count) if mine[8 * i : 8 * i + 8] != right[8 * i : 8 * i + 8])


def _misfit(winner: str, expected: tuple[Entry, ...], name: str, got: tuple[Entry, ...]) -> WancollError:
    """The first key that is not alike, by name."""
    wanted, found = {entry.key: entry for entry in expected}, {entry.key: entry for entry in got}
    for key in sorted({*wanted, *found}):
        one, other = wanted.get(key), found.get(key)
        if one is not None and other is not None:
            if not alike(one, other):
                return _differs("a tensor has another shape or dtype", name, key, winner, str(one), str(other))
        elif one is None:
            return _differs("has a tensor too many", name, key, winner, "no such key", str(other))
        else:
            return _differs("lacks a tensor", name, key, winner, str(one), "no such key")
    for one, other in zip(expected, got, strict=True):
        if one.shares != other.shares:
            return _differs(
                "a tensor shares its memory with another one, and not on all members", name, one.key, winner,
                _shared(expected, one), _shared(got, other),
            )  # fmt: skip
    raise AssertionError("the entries are equal")


def _differs(what: str, name: str, key: str, winner: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        what, who=f"{name}, {_CALL}(state[{key!r}])", expected=f"{expected}, as on {winner}", got=got,
        hint="pass the same keys, shapes and dtypes on all members",
    )  # fmt: skip


def _shared(entries: tuple[Entry, ...], entry: Entry) -> str:
    return f"the memory of {entries[entry.shares].key!r}" if entry.shares >= 0 else "memory of its own"

"""Which member sends which stripes to which in a round, and the members' reports between rounds. Pure.

Every member posts its deliveries in the order of next_round() and waits for nothing else, so the first one that is not
finished is always under way on both sides, whatever bounds there are on how many are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wancoll.errors import OperationAborted, ProtocolError
from wancoll.limits import MIB
from wancoll.sync.verdict import Goal, lost_holders

PACK = 4 * MIB  # stripes that are smaller go together up to this size

_TEXT_BYTES = 500


@dataclass(frozen=True, slots=True)
class Delivery:
    """One send and recv: these stripes, one after the other."""

    sender: str
    receiver: str
    stripes: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a member says before a round."""

    missing: frozenset[int]  # numbers of the stripes that it still lacks
    bad: frozenset[str] = frozenset()  # members from which something did not come, or not right
    problem: str = ""  # why it gives up; empty: it does not


def encode_report(report: RoundReport, stripes: int, members: Sequence[str]) -> bytes:
    """A report for these members; all have the same size."""
    bad = [number for number, name in enumerate(members) if name in report.bad]
    text = report.problem.encode()[:_TEXT_BYTES].decode(errors="ignore").encode()
    return _bits(report.missing, stripes) + _bits(bad, len(members)) + text.ljust(_TEXT_BYTES, b"\0")


def decode_report(data: bytes, stripes: int, members: Sequence[str], who: str) -> RoundReport:
    """The report that *who* sent. Raises ProtocolError: it is none."""
    at, then = math.ceil(stripes / 8), math.ceil(stripes / 8) + math.ceil(len(members) / 8)
    try:
        problem = data[then:].rstrip(b"\0").decode()
    except UnicodeDecodeError as bad:
        raise ProtocolError("sent no report of its state", who=who, got=str(bad)) from bad
    names = frozenset(members[number] for number in _numbers(data[at:then], len(members)))
    return RoundReport(_numbers(data[:at], stripes), names, problem)


def next_round(goal: Goal, reports: Mapping[str, RoundReport]) -> list[Delivery]:
    """The deliveries of the next round; empty: nobody misses anything.

    Every stripe that a member lacks and that some member can send it is sent once, and all that can send it have about
    the same to send. The reports are those of the members that are left, in rank order. Raises OperationAborted: a
    member gave up, or nobody is left that has something.
    """
    for name, report in reports.items():
        if report.problem:
            raise OperationAborted(
                "a member cannot take part", who=f"{name}, sync_state", got=report.problem,
                hint="all tensors are as they were",
            )  # fmt: skip
    senders = [name for name in reports if name not in goal.silent]
    load = dict.fromkeys(senders, 0)
    queues: dict[tuple[str, str], list[Delivery]] = {}
    stuck: list[tuple[int, str]] = []
    portions = [(*portion, receiver) for receiver in reports for portion in _packs(goal, reports, senders, receiver)]
    for holders, numbers, receiver in sorted(portions, key=lambda each: len(each[0])):  # those with a choice make up
        if not holders:
            stuck += [(number, receiver) for number in numbers]
            continue
        sender = min(holders, key=lambda name: (load[name], len(queues.get((name, receiver), ()))))
        nbytes = goal.nbytes(numbers)
        load[sender] += nbytes
        queues.setdefault((sender, receiver), []).append(Delivery(sender, receiver, tuple(numbers), nbytes))
    for number, receiver in stuck:  # somebody may pass it on in a later round
        if not queues or all(number in reports[name].missing for name in senders):
            raise lost_holders(goal, number, receiver)
    return _in_turn(queues)


def _packs(
    goal: Goal, reports: Mapping[str, RoundReport], senders: Sequence[str], receiver: str
) -> list[tuple[tuple[str, ...], list[int]]]:
    """What *receiver* lacks, small stripes together: who could send them, which stripes."""
    mine = reports[receiver]
    able = [name for name in senders if name != receiver and name not in mine.bad and receiver not in reports[name].bad]
    found: list[tuple[tuple[str, ...], list[int]]] = []
    filling: dict[tuple[str, ...], tuple[list[int], int]] = {}  # the pack that still takes stripes, and its bytes
    for number in sorted(mine.missing):
        holders = tuple(name for name in able if number not in reports[name].missing)
        nbytes = goal.stripes[number].nbytes
        pack, used = filling.get(holders, ([], PACK))
        if used + nbytes <= PACK:
            pack.append(number)
        else:
            pack, used = [number], 0
            found.append((holders, pack))
        filling[holders] = pack, used + nbytes
    return found


def _in_turn(queues: Mapping[tuple[str, str], list[Delivery]]) -> list[Delivery]:
    """The pairs take turns, so that all of them are busy."""
    depth = max((len(queue) for queue in queues.values()), default=0)
    return [queue[k] for k in range(depth) for queue in queues.values() if k < len(queue)]


def _bits(numbers: Sequence[int] | frozenset[int], of: int) -> bytes:
    bits = bytearray(math.ceil(of / 8))
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return bytes(bits)


def _numbers(bits: bytes, of: int) -> frozenset[int]:
    return frozenset(number for number in range(of) if bits[number // 8] >> number % 8 & 1)

"""What fences masters from each other (R9), and the face of the places that keep it: the journal, or etcd."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from wancoll.wire import messages as m
from wancoll_master.core.ready import Former, Persist, Used

GROUPS_KEPT = 1024  # at a start, those with the newest epochs
Counted = Annotated[int, Meta(ge=0, le=m.MOST // 2)]  # of what was kept: it is counted on from there (R19)
_Numbers = Annotated[list[Counted], Meta(min_length=4, max_length=4 + 1024)]
_Voids = dict[m.Name, list[Counted]]
_MOST_VOIDS = 8192  # that an Epoch can tell
_Former = Annotated[dict[Counted, tuple[m.Name, m.Bits]], Meta(max_length=1024)]


def voids_as_text(voids: dict[int, str]) -> str:
    """JSON: seqs by the error, which most of them share; "" for none."""
    by_error: dict[str, list[int]] = {}
    for seq, error in voids.items():
        by_error.setdefault(error, []).append(seq)
    return json.dumps(by_error, separators=(",", ":")) if by_error else ""


def former_as_text(former: dict[int, Former]) -> str:
    """JSON: names and daemons by mid; "" for none."""
    return json.dumps({mid: (one.name, one.daemon) for mid, one in former.items()}) if former else ""


def used_from(numbers: Sequence[object], voids: str, former: str) -> Used:
    """What was kept of a group, read: epoch, base, alone, terms and the mids as numbers or text, and the two texts.

    Raises:
        ValueError: no master of this version has written it.
    """
    try:
        epoch, base, alone, terms, *mids = msgspec.convert(numbers, _Numbers, strict=False)
        by_error = msgspec.json.decode(voids, type=_Voids) if voids else {}
        known = msgspec.json.decode(former, type=_Former) if former else {}
    except RecursionError as bad:
        raise ValueError(str(bad)) from bad
    by_seq = {seq: error for error, seqs in by_error.items() for seq in seqs}
    if len(by_seq) > _MOST_VOIDS:
        raise ValueError(f"{len(by_seq)} voids, at most {_MOST_VOIDS} can be")
    return Used(epoch, frozenset(mids), base, by_seq, alone, {mid: Former(*one) for mid, one in known.items()}, terms)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a master starts from. term is its own, above all that were before; elected_by is Welcome's.

    *lost*: earlier masters told more than was found. The numbers have jumped past it, and no group is known.
    """

    term: int
    highest_epoch: int
    next_mid: int
    used: dict[str, Used]  # by group, oldest epoch first
    elected_by: str = ""
    lost: bool = False


class Store(Protocol):
    """Keeps the facts. What was sent for after persist() may be sent once *written* has come up to *asked*."""

    facts: Facts
    asked: int  # writes, so far
    written: int  # of them, in order

    def persist(self, what: Persist) -> None:
        """Raise both numbers, which never fall, and note the groups' newest epochs. Never waits."""

"""What fences masters from each other (R9), and the face of the places that keep it: the journal, or etcd."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

from wancoll_master.core.ready import Persist, Used

GROUPS_KEPT = 1024  # at a start, those with the newest epochs


def voids_as_text(voids: dict[int, str]) -> str:
    """JSON: seqs by the error, which most of them share; "" for none."""
    by_error: dict[str, list[int]] = {}
    for seq, error in voids.items():
        by_error.setdefault(error, []).append(seq)
    return json.dumps(by_error, separators=(",", ":")) if by_error else ""


def voids_from_text(text: str) -> dict[int, str]:
    """The same, read.

    Raises:
        ValueError: it is not.
    """
    try:
        by_error = json.loads(text) if text else {}
        return {int(seq): str(error) for error, seqs in by_error.items() for seq in seqs}
    except (AttributeError, TypeError, OverflowError, RecursionError) as bad:
        raise ValueError(text[:100]) from bad


@dataclass(frozen=True, slots=True)
class Facts:
    """What a master starts from. term is its own, above all that were before."""

    term: int
    highest_epoch: int
    next_mid: int
    used: dict[str, Used]  # by group, oldest epoch first


class Store(Protocol):
    """Keeps the facts. What was sent for after persist() may be sent once *written* has come up to *asked*."""

    facts: Facts
    asked: int  # writes, so far
    written: int  # of them, in order

    def persist(self, what: Persist) -> None:
        """Raise both numbers, which never fall, and note the groups' newest epochs. Never waits."""

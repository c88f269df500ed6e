"""What fences masters from each other (R9), and the face of the places that keep it: the journal, or etcd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wancoll_master.core.ready import Persist, Used

GROUPS_KEPT = 1024  # at a start, those with the newest epochs


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

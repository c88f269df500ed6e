"""A lease in etcd that a slow machine keeps, masters that are quick all the same, and a store that a test has write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from wancoll_master import election
from wancoll_master.core.ready import Persist
from wancoll_master.store.facts import Facts

TTL = 5.0  # seconds


@contextmanager
def quick_elections() -> Iterator[None]:
    """Standbys look as often as with a short lease, and who is stopped has time to give its own back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(election, "_LOOKS_PER_TTL", 10 * TTL)
        patch.setattr(election, "_REVOKE_TIMEOUT", 30.0)
        yield


class Later:
    """A store whose writes are done when the test says so."""

    def __init__(self, term: int = 5) -> None:
        self.facts = Facts(term, 1, 1, {})
        self.asked = self.written = 0
        self.kept: dict[str, str | None] = {}

    def persist(self, what: Persist) -> None:
        self.asked += 1

    def keep(self, changes: dict[str, str | None]) -> None:
        self.kept |= changes
        self.asked += 1

    def keep_whole(self, changes: list[dict[str, Any]]) -> None:
        self.asked += 1

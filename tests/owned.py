"""Files of other users, for tests that are one user, and maybe root."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


def as_if_owned(monkeypatch: pytest.MonkeyPatch, owner: int, user: int) -> None:
    """All files and folders are *owner*'s, and this process is *user*'s."""

    def owned(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def looked(at: Any, **more: Any) -> os.stat_result:
            found = list(look(at, **more))
            found[4] = owner
            return os.stat_result(found)

        return looked

    for name in ("stat", "fstat", "lstat"):
        monkeypatch.setattr(os, name, owned(getattr(os, name)))
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(os, name, lambda: user)

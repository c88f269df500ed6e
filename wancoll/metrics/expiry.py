"""When certificates end, by their files: each is read again only when it has changed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from wancoll.metrics.core import families as f


class Expiry:
    """Reads when certificates end, by their files."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, float]] = {}  # by path: when it was written, when what is in it ends

    def family(self, paths: Mapping[str, str]) -> f.Family:
        """When the certificates at *paths* end, by their use in this process; unreadable ones are left out."""
        ends = ((what, self._end(path)) for what, path in paths.items() if path)
        return f.Family(f.CERTIFICATE, [((what,), end) for what, end in ends if end is not None])

    def _end(self, path: str) -> float | None:
        from wancoll.trust import authority  # loads `cryptography`, which is there where there are certificates

        try:
            written = os.stat(path).st_mtime
            if path not in self._found or self._found[path][0] != written:
                with open(path, "rb") as file:
                    self._found[path] = written, authority.times(file.read())[1]
            return self._found[path][1]
        except (OSError, ValueError):
            return None

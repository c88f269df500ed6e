"""A first-fit allocator of number ranges: hands out parts of [0, size), merges what comes back."""

from __future__ import annotations

from bisect import bisect_left


class Ranges:
    """Which parts of [0, size) are free.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, end), sorted, never adjacent

    def take(self, size: int, align: int) -> int | None:
        """The start of *size* free bytes that is a multiple of *align*, or None."""
        for i, (start, end) in enumerate(self._free):
            first = -(-start // align) * align
            if first + size <= end:
                rest = [(start, first)] if start < first else []
                if first + size < end:
                    rest.append((first + size, end))
                self._free[i : i + 1] = rest
                return first
        return None

    def give(self, start: int, size: int) -> None:
        """Take back what take() handed out."""
        end = start + size
        at = bisect_left(self._free, (start, end))
        before = after = at
        if at and self._free[at - 1][1] == start:
            before, start = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end:
            after, end = at + 1, self._free[at][1]
        self._free[before:after] = [(start, end)]

    @property
    def free(self) -> int:
        """Free bytes."""
        return sum(end - start for start, end in self._free)

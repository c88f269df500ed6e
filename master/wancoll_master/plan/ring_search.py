"""A ring through many members whose slowest edge is fast: local search with a bound on its steps. Pure.

The bottleneck first: the slowest edge is cut and the ring put together otherwise with edges that are all faster, by
exchanging two segments (3-opt without reversal, of which Or-opt is a case). From several beginnings, the last of them
kicked by double bridges (Martin, Otto and Felten, 1991). Then the latency, by moves within the edges that are as fast
as the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Matrix = Sequence[Sequence[float]]
FORBIDDEN = -1.0  # bandwidth of an edge that must not be used


class _Budget:
    """Moves left to look at."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._seed = 1

    def random(self, below: int) -> int:
        """A number from 0 up to *below*, the same in each run (a linear congruential generator, Knuth's constants)."""
        self._seed = (self._seed * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._seed >> 33) % below


def search(count: int, bandwidth: Matrix, latency: Matrix, allowed: Sequence[int], steps: int) -> list[int] | None:
    """A good ring as a list of places from 0; None if none without forbidden edges was found.

    Bandwidth (above 0) and latency are [from][to]. *allowed* has for each place the set (as bits) of its possible
    neighbours. A step is a move to look at, about a microsecond. There are at least 4 places.
    """
    speed = [[bandwidth[a][b] if allowed[a] >> b & 1 else FORBIDDEN for b in range(count)] for a in range(count)]
    bound = min(max(row) for row in speed)
    for b in range(count):
        bound = min(bound, max(speed[a][b] for a in range(count)))
    budget = _Budget(steps * 3 // 4)
    best: list[int] = []
    for start in (_greedy(count, speed, latency), list(range(count))):
        found = _widen(start, speed, budget)
        if not best or _slowest(found, speed) > _slowest(best, speed):
            best = found
    while budget.steps > 0 and _slowest(best, speed) < bound:
        found = _widen(_kick(best, budget), speed, budget)
        if _slowest(found, speed) >= _slowest(best, speed):
            best = found
    floor = _slowest(best, speed)
    if floor == FORBIDDEN:
        return None
    best = _shorten(best, speed, latency, floor, _Budget(budget.steps + steps // 4))
    first = best.index(0)
    return best[first:] + best[:first]


def _slowest(path: Sequence[int], speed: Matrix) -> float:
    return min(speed[a][b] for a, b in zip(path, [*path[1:], path[0]], strict=True))


def _greedy(count: int, speed: Matrix, latency: Matrix) -> list[int]:
    """Take the fastest edges, the nearest of equals, as long as they make paths."""
    after, before = [-1] * count, [-1] * count
    root = list(range(count))

    def find(a: int) -> int:
        while root[a] != a:
            root[a] = root[root[a]]
            a = root[a]
        return a

    edges = [(a, b) for a in range(count) for b in range(count) if a != b]
    edges.sort(key=lambda edge: (-speed[edge[0]][edge[1]], latency[edge[0]][edge[1]]))
    for a, b in edges:
        if after[a] < 0 and before[b] < 0 and find(a) != find(b):
            after[a], before[b] = b, a
            root[find(a)] = find(b)
    path = [before.index(-1)]
    while after[path[-1]] >= 0:
        path.append(after[path[-1]])
    return path


def _kick(path: Sequence[int], budget: _Budget) -> list[int]:
    """A double bridge: two neighbouring segments change places."""
    budget.steps -= len(path)
    i, j, k = sorted(1 + budget.random(len(path) - 1) for _ in range(3))
    return [*path[:i], *path[j:k], *path[i:j], *path[k:]]


# ---- the bottleneck ---------------------------------------------------------------------------------


def _widen(path: list[int], speed: Matrix, budget: _Budget) -> list[int]:
    """Replace the slowest edge as long as that is possible."""
    while budget.steps > 0:
        edges = list(zip(path, path[1:] + path[:1], strict=True))
        cut = min(range(len(path)), key=lambda i: speed[edges[i][0]][edges[i][1]])
        path = path[cut + 1 :] + path[: cut + 1]  # the slowest edge closes the ring now
        better = _exchange(path, speed, budget)
        if better is None:
            return path
        path = better
    return path


def _exchange(path: list[int], speed: Matrix, budget: _Budget) -> list[int] | None:
    """A B C becomes A C B: the best of those whose three new edges beat the one that closes the ring."""
    first, last = path[0], path[-1]
    worst = speed[last][first]
    closers = [j for j in range(1, len(path) - 1) if speed[path[j]][first] > worst]  # ends of B
    found, gain = (0, 0), worst
    budget.steps -= 2 * len(path)
    for i in range(len(path) - 2):  # the end of A
        if speed[last][path[i + 1]] <= gain:
            continue
        row = speed[path[i]]
        budget.steps -= len(closers)
        for j in closers:
            if j > i and row[path[j + 1]] > gain:
                slowest = min(row[path[j + 1]], speed[last][path[i + 1]], speed[path[j]][first])
                if slowest > gain:
                    found, gain = (i, j), slowest
    if gain == worst:
        return None
    i, j = found
    return path[: i + 1] + path[j + 1 :] + path[i + 1 : j + 1]


# ---- the latency ------------------------------------------------------------------------------------


def _shorten(path: list[int], speed: Matrix, latency: Matrix, floor: float, budget: _Budget) -> list[int]:
    """Move segments elsewhere while that shortens the ring and uses no edge below *floor*."""
    count = len(path)
    fails = 0
    while fails < count and budget.steps > 0:  # each turn the ring begins one place later
        better = _move(path, speed, latency, floor, budget) or _swap(path, speed, latency, floor, budget)
        fails = 0 if better else fails + 1
        path = better or path
        path = path[1:] + path[:1]
    return path


def _move(path: list[int], speed: Matrix, latency: Matrix, floor: float, budget: _Budget) -> list[int] | None:
    """The best place for a segment of one to three that begins the path, forwards or backwards."""
    best: list[int] | None = None
    gain = 1e-12  # below is rounding
    last = path[-1]
    for size in range(1, min(3, len(path) - 2) + 1):
        forwards, rest = path[:size], path[size:]
        if speed[last][rest[0]] < floor:
            continue
        freed = latency[last][forwards[0]] + latency[forwards[-1]][rest[0]] - latency[last][rest[0]]
        inside = sum(latency[a][b] for a, b in pairwise(forwards))
        for segment in (forwards, forwards[::-1]) if size > 1 else (forwards,):
            if min((speed[a][b] for a, b in pairwise(segment)), default=floor) < floor:
                continue
            turned = sum(latency[a][b] for a, b in pairwise(segment)) - inside
            budget.steps -= len(rest)
            for i, (a, b) in enumerate(pairwise(rest)):
                won = freed - turned - latency[a][segment[0]] - latency[segment[-1]][b] + latency[a][b]
                if won > gain and speed[a][segment[0]] >= floor and speed[segment[-1]][b] >= floor:
                    best, gain = rest[: i + 1] + segment + rest[i + 1 :], won
    return best


def _swap(path: list[int], speed: Matrix, latency: Matrix, floor: float, budget: _Budget) -> list[int] | None:
    """A B C becomes A C B, where the edge that closes the ring is one of those that go: the first that shortens it."""
    first, last = path[0], path[-1]
    for i in range(len(path) - 2):  # the end of A
        a, b = path[i], path[i + 1]
        if speed[last][b] < floor:
            continue
        freed = latency[last][first] + latency[a][b] - latency[last][b] - 1e-12
        budget.steps -= len(path) - i
        for j in range(i + 1, len(path) - 1):  # the end of B
            end, start = path[j], path[j + 1]
            won = freed + latency[end][start] - latency[a][start] - latency[end][first]
            if won > 0 and speed[a][start] >= floor and speed[end][first] >= floor:
                return path[: i + 1] + path[j + 1 :] + path[i + 1 : j + 1]
    return None

"""How much a world's cores remember, by the path to it: what grows from fault to fault is never forgotten."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import msgspec

from tests.sim.world import World

PLAIN = {type(None), bool, int, float, str, bytes}
CONTAINERS = (dict, set, frozenset, list, tuple, deque)
CACHES = {  # that are bounded by their own, and fill up
    "member._calls._calls": 256,
    "member._calls._worlds": 4096,
    "master.missing": 4096,
    "master.gone": 1024,
    "master.connections[].members[].group.troubles": 64,
    "master.connections[].members": 8,  # clients that happen to call at one daemon
}


def census(world: World) -> dict[str, int]:
    """The largest size of each container, by the names that lead to it."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    master = world.master
    assert master is not None
    roots = [("journal", world.journal), ("master", master.state)]
    for daemon in world.daemons:
        if daemon.alive:
            roots.append(("links", daemon.links.core))
            roots += [("member", session.member) for session in daemon.sessions]
    for path, root in roots:
        _count(root, path, seen, sizes)
    return sizes


def _count(held: Any, path: str, seen: set[int], sizes: dict[str, int]) -> None:
    if type(held) in PLAIN or isinstance(held, type | Enum) or callable(held) or id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, CONTAINERS):
        sizes[path] = max(len(held), sizes.get(path, 0))
        inside = f"{path}[]"
        for inner in held.values() if isinstance(held, dict) else held:
            if type(inner) not in PLAIN:
                _count(inner, inside, seen, sizes)
        return
    for name in _names(held):
        inner = getattr(held, name, None)
        if type(inner) not in PLAIN:
            _count(inner, f"{path}.{name}", seen, sizes)


def _names(held: Any) -> Iterable[str]:
    if isinstance(held, msgspec.Struct):
        return held.__struct_fields__
    if is_dataclass(held):
        return held.__dataclass_fields__
    return getattr(held, "__dict__", ())


def grown(seed: int, faults: tuple[str, ...], spans: int) -> list[str]:
    """What grows with spans of the same faults. What seems to, which may be chance, has to go on in many more."""
    found = _grown(seed, faults, spans)
    return [path for path in _grown(seed, faults, 4 * spans) if path.split(":")[0] in str(found)] if found else []


def _grown(seed: int, faults: tuple[str, ...], spans: int) -> list[str]:
    """What is never as small in the last third as ever in the one before."""
    world = World(seed, faults=faults)
    taken: list[dict[str, int]] = []
    world.run(spans, lambda: taken.append(census(world)))
    third = len(taken) // 3
    before, last = taken[-2 * third : -third], taken[-third:]
    found = []
    for path in last[-1]:
        most, least = max(one.get(path, 0) for one in before), min(one.get(path, 0) for one in last)
        if least > most + 1 and last[-1][path] > CACHES.get(path, 0):
            found.append(f"{path}: {[one.get(path, 0) for one in taken]}")
    return found

"""What sync_state takes beside plain mappings of tensors: models, optimizers, schedulers, random generators, ...

Each becomes tensors with names, and bytes for how it nests and its plain values. Where the state that won has other
tensors than this member's, as an optimizer's that has taken steps, memory is made for them. torch is never imported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from wancoll.client.memory.tensors import Region, is_torch, kind_of, made_like, spread_of
from wancoll.client.syncing.state import Tensor, look
from wancoll.errors import ConfigError, ProtocolError, WancollError
from wancoll.sync.manifest import Entry, Thing
from wancoll.sync.plain import Slot, fill, pack, unpack
from wancoll.sync.verdict import Goal, alike

_CALL = "sync_state"
_GENERATORS = (np.random.Generator, random.Random)


@dataclass(frozen=True, slots=True)
class _Held:
    """One thing."""

    name: str  # unique among the things of a call
    get: Callable[[], Mapping[Any, Any]]  # its state
    put: Callable[[Any], object]  # gives it one
    loose: bool  # it takes another state as a whole, whatever it held
    live: bool  # its state's tensors are its own, so that it need not be told when they change


class Things:
    """The things of one sync_state. Raises ConfigError: one of them cannot be synchronised."""

    def __init__(self, given: Sequence[Any]) -> None:
        names: dict[str, int] = {}
        self._held: list[_Held] = []
        for thing in given:
            name = type(thing).__name__
            names[name] = names.get(name, 0) + 1
            self._held.append(_held(thing, name if names[name] == 1 else f"{name}#{names[name]}"))
        self.tensors: dict[str, Any] = {}  # of all things, by name
        # What other members are told beside the tensors.
        self.described = tuple(Thing(each.name, each.loose, self._packed(each)) for each in self._held)
        self._mine = self.described
        self._made: set[str] = set()  # tensors that were not there

    def _packed(self, held: _Held) -> bytes:
        def slot_of(value: Any, path: str) -> Slot | None:
            if not _is_tensor(value):
                return None
            key = f"{held.name}/{path}"
            if key in self.tensors:
                raise ConfigError(
                    "has two tensors of one name", who=f"{_CALL}: {held.name}", got=path, hint="rename one of them"
                )
            self.tensors[key] = value
            return Slot("torch" if is_torch(value) else "numpy")

        return pack(held.get(), held.name, slot_of)

    def fit(self, goal: Goal, found: Sequence[Tensor]) -> list[Tensor]:
        """Memory for the winner's tensors, in its order: this member's own, or new.

        Raises:
            ProtocolError: the winner's state contradicts itself.
            MemoryError: so it is.
        """
        slots: dict[str, Slot] = {}
        for thing in goal.things:

            def slot(path: str, each: Slot, thing: Thing = thing) -> None:
                slots[f"{thing.name}/{path}"] = each

            fill(unpack(thing.plain, _CALL), slot)
        if sorted(slots) != [entry.key for entry in goal.entries]:
            raise ProtocolError(
                "the state that won contradicts itself", who=_CALL, expected=f"{len(slots)} tensors, by its plain part",
                got=f"{len(goal.entries)}",
            )  # fmt: skip
        mine = {tensor.entry.key: tensor for tensor in found}
        fitted: list[Tensor] = []
        for number, entry in enumerate(goal.entries):
            own = mine.get(entry.key)
            if own is not None and not alike(own.entry, entry):
                own = None
            if entry.shares >= 0:
                fitted.append(Tensor(self._shared(goal, number, fitted, own), entry))
            elif own is not None and own.entry.shares < 0:
                fitted.append(Tensor(own.memory, entry))
            else:
                like = next((each for each in self.tensors.values() if spread_of(each) == entry.spread), None)
                made = self.tensors[entry.key] = _new(entry, slots[entry.key].library, like)
                self._made.add(entry.key)
                fitted.append(Tensor(look(made, entry.key)[0], entry))
        return fitted

    def _shared(self, goal: Goal, number: int, fitted: Sequence[Tensor], own: Tensor | None) -> Region:
        """Memory of a tensor that has an earlier one's."""
        entry = goal.entries[number]
        first = goal.entries[entry.shares]  # an earlier one: see manifest.decode
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise ProtocolError("the state that won has a tensor that cannot be made here", who=f"{_CALL}: {entry.key}")
        memory = fitted[entry.shares].memory
        if own is None or own.memory.address != memory.address:
            self.tensors[entry.key] = self.tensors[first.key]
            self._made.add(entry.key)
        return memory

    def load(self, goal: Goal, missing: frozenset[int]) -> None:
        """Tell the things what changed: their tensors have the winner's bytes.

        Raises:
            ConfigError: a thing refuses its state.
        """
        changed = {goal.entries[number].key for number in goal.tensors(missing)} | self._made
        for held, mine, won in zip(self._held, self._mine, goal.things, strict=True):
            prefix = f"{held.name}/"
            told = mine.plain != won.plain
            if not held.live:
                told = told or any(key.startswith(prefix) for key in changed)
            if not told:
                continue

            def tensor(path: str, _slot: Slot, prefix: str = prefix) -> Any:
                return self.tensors[prefix + path]

            try:
                held.put(fill(unpack(won.plain, _CALL), tensor))
            except Exception as bad:  # its own, whatever it is
                said = str(bad) if isinstance(bad, WancollError) else repr(bad)
                raise ConfigError(
                    "the state that won could not be loaded", who=f"{_CALL}: {held.name}", got=said[:500],
                    hint="the others have it; what this member passed must be made as theirs",
                ) from bad  # fmt: skip


def things_of(state: Sequence[Any]) -> Things | None:
    """What sync_state was given; None: one plain mapping of tensors."""
    if not state:
        raise ConfigError("nothing is to be synchronised", who=f"{_CALL}()", expected="a state")
    if len(state) == 1:
        only = state[0]
        plain = isinstance(only, Mapping) and not any(isinstance(each, Mapping) for each in only.values())
        if plain or not (isinstance(only, Mapping) or _takes(only)):
            return None
    return Things(state)


def _takes(thing: Any) -> bool:
    return hasattr(thing, "state_dict") or hasattr(thing, "get_state") or isinstance(thing, _GENERATORS)


def _held(thing: Any, name: str) -> _Held:
    torch = sys.modules.get("torch")
    if isinstance(thing, Mapping):
        return _Held(name, lambda: thing, lambda tree: _put(thing, tree, name), loose=False, live=True)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        module = torch is not None and isinstance(thing, torch.nn.Module)
        return _Held(name, thing.state_dict, thing.load_state_dict, loose=not module, live=module)
    if torch is not None and isinstance(thing, torch.Generator):
        return _Held(
            name, lambda: {"state": thing.get_state()}, lambda tree: thing.set_state(tree["state"]),
            loose=False, live=False,
        )  # fmt: skip
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator

        def put(tree: Any) -> None:
            bits.state = tree

        return _Held(name, lambda: bits.state, put, loose=True, live=False)
    if isinstance(thing, random.Random):
        return _Held(
            name, lambda: {"state": thing.getstate()}, lambda tree: thing.setstate(tree["state"]),
            loose=True, live=False,
        )  # fmt: skip
    raise ConfigError(
        "this cannot be synchronised", who=f"{_CALL}(...)",
        expected="a dict of tensors, an object with state_dict and load_state_dict, or a random generator",
        got=kind_of(thing),
    )  # fmt: skip


def _put(into: Any, tree: Mapping[Any, Any], who: str) -> None:
    """The plain values of *tree*; its tensors are those of *into*, and have their bytes."""
    if not isinstance(into, MutableMapping):
        raise TypeError(f"{who}: plain values of a {type(into).__name__} cannot be changed")
    for key in [key for key in into if key not in tree]:
        del into[key]
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), Mapping):
            _put(into[key], value, who)
        elif not _is_tensor(value):
            into[key] = value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_torch(value) or hasattr(type(value), "__dlpack__")


def _new(entry: Entry, library: str, like: Any) -> Any:
    """A tensor as the winner's *entry* describes it, *like* one that lies on a mesh as it does.

    Raises ProtocolError: it describes none, or there is none like it.
    """
    try:
        if entry.spread and like is None:
            raise ValueError("no tensor of this member lies on its mesh like that")
        if library == "torch":
            torch: Any = sys.modules["torch"]
            dtype = getattr(torch, entry.dtype)
            size, make = dtype.itemsize, torch.empty
        else:
            dtype = np.dtype(entry.dtype)
            if dtype.hasobject:
                raise TypeError("elements that are Python objects")
            size, make = dtype.itemsize, np.empty
        if min(entry.shape, default=0) < 0 or len(entry.shape) > 64 or prod(entry.shape) * size != entry.nbytes:
            raise ValueError("a size that its shape contradicts")
        return made_like(like, make(entry.shape, dtype=dtype)) if entry.spread else make(entry.shape, dtype=dtype)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as bad:
        raise ProtocolError(
            "the state that won has a tensor that cannot be made here", who=f"{_CALL}: {entry.key}", got=str(bad)[:200],
            expected=str(entry)[:200],
        ) from bad  # fmt: skip

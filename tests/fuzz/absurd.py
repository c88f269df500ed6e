"""Messages typed right that mean nothing: any value that a type allows, at every field, those at its ends first.

A *chance* says what is taken: drawn from a seed, or read from bytes, so that a fuzzer that looks at coverage can steer
it. Values that are in use (names, ids, epochs) come often, for absurd ones alone would all end at the first check.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import inspect

_LONG = 24  # items of a list, at most, but for the rare ones that are as long as may be


class Chance(Protocol):
    """Where choices come from."""

    def pick(self, count: int) -> int:
        """A number from 0 up to below *count*."""


class Drawn:
    """From a seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed).random

    def pick(self, count: int) -> int:
        return int(self._draw() * count)


class Read:
    """From bytes; 0 once there are no more."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)

    def pick(self, count: int) -> int:
        width = 1 if count <= 256 else 4
        at, self._at = self._at, self._at + width
        return int.from_bytes(self._data[at : at + width], "little") % count


Make = Callable[[Chance], Any]

NUMBERS = (
    *range(11),
    *(100, 1023, 1024, 1025, 4096, 4097, 8192),
    *(1 << 16, 1 << 31, 1 << 32, 1 << 53),
)
NAMES = ("g", "h", "m0", "m1", "m2", "d0", "d1", "d2", "evil", "ring", "all_reduce", "lost", "unreachable", "moving")
ADDRESSES = ("127.0.0.1:1", "[::1]:7000", "host:65535", "a:99999", ":::", "h:0", "h:-1", "ü:1", "h" * 290 + ":1")
REALS = (0.0, -0.0, 1.0, 0.001, -1.0, 5e-324, 1e9, -1e9, 1e15, -1e15, 0.5, 3.5)


class Absurd:
    """Makes messages.

    Args:
        names: in use.
        others: values for fields of these names, which come seven times of eight: mid=[1, 2], ... (the lists may
            change)
    """

    def __init__(self, names: Sequence[str] = NAMES, **others: Sequence[Any]) -> None:
        self._names, self._others = names, others
        self._makers: dict[type, Make] = {}

    def message(self, kind: type, chance: Chance) -> Any:
        """Any message of the class *kind*."""
        made = self._makers.get(kind)
        if made is None:
            made = self._makers[kind] = self._struct(_type_info(kind))
        return made(chance)

    def _struct(self, info: Any) -> Make:
        fields = [(field.name, self._field(field.name, field.type)) for field in info.fields]
        of = info.cls

        def make(chance: Chance) -> Any:
            return of(**{name: field(chance) for name, field in fields})

        return make

    def _field(self, name: str, info: Any) -> Make:
        made, known = self._of(info), self._others.get(name)
        several = inspect.ListType | inspect.VarTupleType | inspect.TupleType | inspect.DictType
        if known is None or isinstance(info, several) != bool(known and isinstance(known[0], list | tuple)):
            return made  # fields of this name have different types
        if isinstance(info, inspect.EnumType) and not all(isinstance(one, info.cls) for one in known):
            return made
        return lambda chance: known[chance.pick(len(known))] if known and chance.pick(8) else made(chance)

    def _of(self, info: Any) -> Make:
        """For one type."""
        match info:
            case inspect.IntType():
                low = info.ge if info.ge is not None else -(1 << 63)
                high = info.le if info.le is not None else (1 << 64) - 1
                ends = [low, high, high - 1, high // 2, high // 2 + 1, high // 4, (1 << 60), (1 << 60) + 1]
                return _one_of([n for n in dict.fromkeys((*NUMBERS, *ends)) if low <= n <= high])
            case inspect.FloatType():
                low, high = (info.ge if info.ge is not None else -1e300), (info.le if info.le is not None else 1e300)
                odd = [] if info.le is not None else [float("inf"), float("nan")]
                return _one_of([*[n for n in (*REALS, low, high) if low <= n <= high], *odd])
            case inspect.BoolType():
                return _one_of([False, True])
            case inspect.StrType():
                least, most = info.min_length or 0, info.max_length or 5000
                pool = [*self._names, *(ADDRESSES if most == 300 else ()), "", "\x00", "\U0001f4a9" * most, "x" * most]
                return _one_of([text for text in pool if least <= len(text) <= most])
            case inspect.BytesType():
                size = info.min_length or 0
                return _one_of([b"k" * size, bytes(size), b"\xff" * (info.max_length or 100)])
            case inspect.EnumType():
                return _one_of(list(info.cls))
            case inspect.LiteralType():
                return _one_of(list(info.values))
            case inspect.NoneType():
                return lambda chance: None
            case inspect.UnionType():
                makes = [self._of(one) for one in info.types]
                return lambda chance: makes[chance.pick(len(makes))](chance)
            case inspect.StructType():
                return self._struct(info)
            case inspect.ListType():
                return _several(self._of(info.item_type), info.min_length or 0, info.max_length or 2000, list)
            case inspect.VarTupleType():
                return _several(self._of(info.item_type), info.min_length or 0, info.max_length or 2000, tuple)
            case inspect.TupleType():
                items = [self._of(one) for one in info.item_types]
                return lambda chance: tuple(item(chance) for item in items)
            case inspect.DictType():
                pair = _both(self._of(info.key_type), self._of(info.value_type))
                return _several(pair, info.min_length or 0, min(info.max_length or 50, 50), dict)
        raise AssertionError(f"messages have a type that nothing is made of: {info}")


_type_info = functools.cache(inspect.type_info)  # it takes milliseconds


def _one_of(values: Sequence[Any]) -> Make:
    return lambda chance: values[chance.pick(len(values))]


def _both(key: Make, value: Make) -> Make:
    return lambda chance: (key(chance), value(chance))


def _several(item: Make, least: int, most: int, kind: Callable[[list[Any]], Any]) -> Make:
    """Few, mostly; as many as may be, seldom: then they are all of a few."""

    def make(chance: Chance) -> Any:
        count = least + chance.pick(4)
        if chance.pick(16) == 0:
            count = chance.pick(_LONG)
        elif chance.pick(200) == 0:
            some = [item(chance) for _ in range(8)]
            return kind([some[i % 8] for i in range(most)])
        return kind([item(chance) for _ in range(max(least, min(count, most)))])

    return make


def kinds(union: Any) -> list[type]:
    """The classes of a union of messages, flat."""
    members = getattr(union, "__args__", None)
    return [union] if members is None else [kind for one in members for kind in kinds(one)]


def typed(message: msgspec.Struct, union: Any) -> bool:
    """Whether it comes through the decoder of *union*."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union)
    except msgspec.ValidationError:
        return False
    return True

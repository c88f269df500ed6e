"""What a state has beside the bytes of its tensors: how it nests, and its plain values, as msgpack. Pure.

What comes from others is bounded in bytes, depth and types, and makes nothing but None, bool, int, float, str, bytes,
list, tuple, dict, Counter, and Slots for tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import MIB

MAX_BYTES = 4 * MIB  # of one thing's; an empty dict of one byte takes 64 in memory
MAX_DEPTH = 32
MAX_TUPLES = 4096  # that are keys: a sender can choose some that share a hash, and each is compared with all before

_TUPLE, _COUNTER, _SLOT, _INT = 1, 2, 3, 4  # msgpack's own types
_INT_BYTES = 1024
_BITS = 64
_TUPLE_KEY = 8
_KEYS = f"str, bytes, None, bool, float, int of {_BITS} bits, or a tuple of at most {_TUPLE_KEY} of these"
_CALL = "sync_state"


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place. *library* is "torch" or "numpy": whose tensor is made where there is none."""

    library: str


def pack(tree: Any, who: str, slot_of: Callable[[Any, str], Slot | None]) -> bytes:
    """A nested state as bytes; the same for equal states, whatever the order of their keys.

    *slot_of* is asked of each value with its path; None: it is no tensor. Raises ConfigError, of *who*: there is
    something that is neither plain nor a tensor, or too much.
    """
    packed = _pack(tree, who, "", 0, slot_of)
    if len(packed) > MAX_BYTES:
        raise ConfigError(
            "has too much beside its tensors", who=f"{_CALL}: {who}", expected=f"{MAX_BYTES} bytes at most",
            got=str(len(packed)), hint="keep large values in tensors",
        )  # fmt: skip
    return packed


def _pack(value: Any, who: str, path: str, depth: int, slot_of: Callable[[Any, str], Slot | None]) -> bytes:
    def refuse(what: str, expected: str, got: str) -> ConfigError:
        return ConfigError(what, who=f"{_CALL}: {who}, at {path or 'the top'}", expected=expected, got=got)

    def inner(each: Any, name: object) -> bytes:
        return _pack(each, who, joined(path, name), depth + 1, slot_of)

    if depth > MAX_DEPTH:
        raise refuse("is nested too deeply", f"a depth of {MAX_DEPTH} at most", "more")
    slot = slot_of(value, path)
    if slot is not None:
        return _plain(msgpack.ExtType(_SLOT, slot.library.encode()))
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()  # numpy's numbers
    if isinstance(value, Mapping):
        for key in value:
            if not _is_key(key):
                raise refuse("has a key that cannot be carried", _KEYS, f"{type(key).__name__}")
        pairs = sorted(
            (_pack(key, who, joined(path, key), depth + 1, _no_slot), inner(each, key)) for key, each in value.items()
        )
        body = msgpack.Packer().pack_map_header(len(pairs)) + b"".join(key + each for key, each in pairs)
        return _plain(msgpack.ExtType(_COUNTER, body)) if isinstance(value, Counter) else body
    if isinstance(value, list | tuple):
        body = msgpack.Packer().pack_array_header(len(value))
        body += b"".join(inner(each, i) for i, each in enumerate(value))
        return _plain(msgpack.ExtType(_TUPLE, body)) if isinstance(value, tuple) else body
    if isinstance(value, bool) or value is None or isinstance(value, str | bytes):
        return _plain(value)
    if isinstance(value, float):
        return _plain(float(value))
    if isinstance(value, int):
        number = int(value)
        if -(1 << _BITS - 1) <= number < 1 << _BITS:
            return _plain(number)
        size = number.bit_length() // 8 + 1
        if size <= _INT_BYTES:
            return _plain(msgpack.ExtType(_INT, number.to_bytes(size, "little", signed=True)))
        raise refuse("has a number that is too large", f"{_INT_BYTES} bytes at most", f"{size}")
    raise refuse(
        "has a value that cannot be carried", "tensors, None, bool, int, float, str, bytes, list, tuple, dict",
        f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins."),
    )  # fmt: skip


def unpack(data: bytes, who: str) -> Any:
    """What pack() gave, from *who*: lists, dicts and so on, with Slots. Raises ProtocolError: it is none."""
    if len(data) > MAX_BYTES:
        raise ProtocolError(
            "sent too much of its state", who=who, expected=f"{MAX_BYTES} bytes at most", got=str(len(data))
        )
    try:
        found = _Unpacking().unpack(data, 0)
        _check_depth(found, 0)
        return found
    except RecursionError as bad:
        raise ProtocolError("sent a state that is nested too deeply", who=who, got=str(bad)) from bad
    except (ValueError, TypeError, msgpack.UnpackException) as bad:
        raise ProtocolError("sent no state", who=who, got=f"{type(bad).__name__}: {bad}") from bad


class _Unpacking:
    """One state that is read; its maps are made only of keys that cannot be chosen to collide."""

    def __init__(self) -> None:
        self._tuples = 0

    def unpack(self, data: bytes, depth: int) -> Any:
        def made(code: int, body: bytes) -> Any:
            if code == _SLOT and body in (b"torch", b"numpy"):
                return Slot(body.decode())
            if code == _INT and len(body) <= _INT_BYTES:
                return int.from_bytes(body, "little", signed=True)
            if code == _TUPLE and isinstance(found := self.unpack(body, depth + 1), list):
                return tuple(found)
            if code == _COUNTER and isinstance(found := self.unpack(body, depth + 1), dict):
                return Counter(found)
            raise ValueError(f"a value of unknown type {code}")

        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        return msgpack.unpackb(data, ext_hook=made, object_pairs_hook=self._mapping, strict_map_key=False)

    def _mapping(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        for key, _ in pairs:
            if not _is_key(key):
                raise ValueError(f"a key of type {type(key).__name__}")
            self._tuples += isinstance(key, tuple)
        if self._tuples > MAX_TUPLES:
            raise ValueError(f"more than {MAX_TUPLES} keys that are tuples")
        return dict(pairs)


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return len(key) <= _TUPLE_KEY and all(not isinstance(each, tuple) and _is_key(each) for each in key)
    if isinstance(key, int):  # of longer ones as many share a hash as one likes; strings have secret hashes
        return -(1 << _BITS - 1) <= key < 1 << _BITS
    return key is None or isinstance(key, str | bytes | float)


def _check_depth(value: Any, depth: int) -> None:
    if depth > 2 * MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        for each in value.values():
            _check_depth(each, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_depth(each, depth + 1)
    elif isinstance(value, msgpack.Timestamp):
        raise ValueError("a time")


def fill(tree: Any, tensor: Callable[[str, Slot], Any], path: str = "") -> Any:
    """*tree* with what *tensor* says for the path of each Slot."""
    if isinstance(tree, Slot):
        return tensor(path, tree)
    if isinstance(tree, dict):
        pairs = {key: fill(each, tensor, joined(path, key)) for key, each in tree.items()}
        return Counter(pairs) if isinstance(tree, Counter) else pairs
    if isinstance(tree, list | tuple):
        values = [fill(each, tensor, joined(path, i)) for i, each in enumerate(tree)]
        return tuple(values) if isinstance(tree, tuple) else values
    return tree


def joined(path: str, key: object) -> str:
    """The path of a value below *path*."""
    return f"{path}.{key}" if path else str(key)


def _plain(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _no_slot(_value: Any, _path: str) -> None:
    return None

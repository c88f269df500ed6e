"""wancoll's errors as torch's users catch them: also RuntimeError, and saying which operation failed."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, cast

from torch.distributed import DistBackendError

from wancoll.errors import TimeoutError, WancollError


def raised(bad: WancollError, call: str, also: str = "") -> WancollError:
    """*bad* as an error of *call*: of the same class, and of torch's DistBackendError (a RuntimeError).

    *also* is more that is known, for example who was lost.
    """
    if isinstance(bad, DistBackendError):
        return bad
    text = f"{call}: " + _PLACE.sub(r"\1", bad.what) + (f" ({also})" if also else "")
    fields = {name: value for name, value in vars(bad).items() if name not in _OWN}
    if isinstance(bad, TimeoutError) and bad.work is not None:
        fields["hint"] = "the operation goes on: wait() for it again, or give a longer timeout="
    found = _made(type(bad), text, fields)
    found.__cause__ = bad.__cause__
    if isinstance(bad, TimeoutError):
        found.work = bad.work  # type: ignore[attr-defined]
    return found


_OWN = ("what", "work")
_PLACE = re.compile(r"(\brank-\d+) \(rank \d+\)")  # in the ring, which is no rank of torch's


@cache
def _both(kind: Any) -> Any:
    members = {"__reduce__": _reduce, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, DistBackendError), {**members, "__doc__": kind.__doc__, "_kind": kind})


def _made(kind: type[WancollError], what: str, fields: dict[str, Any]) -> WancollError:
    found: WancollError = _both(cast("Any", kind))(what, **fields)
    return found


def _reduce(self: Any) -> tuple[Any, ...]:
    fields = {name: value for name, value in vars(self).items() if name not in _OWN and name[:1] != "_"}
    return _made, (self._kind, self.what, fields)

"""wancoll's errors as torch's users catch them: also RuntimeError, and saying which operation failed."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.distributed import DistBackendError

from wancoll import errors
from wancoll.errors import WancollError


def raised(bad: WancollError, call: str, also: str = "") -> WancollError:
    """*bad* as an error of *call*: of the same class, and of torch's DistBackendError (a RuntimeError).

    Args:
        bad: what the client raised.
        call: the operation's name.
        also: more that is known, for example who was lost.
    """
    if isinstance(bad, DistBackendError):
        return bad
    text = f"{call}: {bad.what}" + (f" ({also})" if also else "")
    found = _made(type(bad).__name__, text, {name: value for name, value in vars(bad).items() if name != "what"})
    found.__cause__ = bad.__cause__
    return found


@cache
def _both(name: str) -> Any:
    kind = getattr(errors, name, WancollError)
    return type(
        name, (kind, DistBackendError), {"__reduce__": _reduce, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def _made(name: str, what: str, fields: dict[str, Any]) -> WancollError:
    public = {key: value for key, value in fields.items() if not key.startswith("_") and key != "work"}
    found: WancollError = _both(name)(what, **public)
    found.__dict__.update(fields)
    return found


def _reduce(self: WancollError) -> tuple[Any, ...]:
    fields = {name: value for name, value in vars(self).items() if name not in ("what", "work") and name[:1] != "_"}
    return _made, (type(self).__name__, self.what, fields)

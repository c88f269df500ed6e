"""The exception tree. Every error says who, what, expected, got, and what to do next."""

from __future__ import annotations

import builtins
from functools import partial
from typing import Any


class WancollError(Exception):
    """Base of all expected failures.

    Args:
        what: what went wrong, one sentence.
        who: the member, peer or argument it concerns.
        expected: what would have been right.
        got: what was found instead.
        hint: what the reader can do next.
    """

    def __init__(
        self,
        what: str,
        *,
        who: str = "",
        expected: str = "",
        got: str = "",
        hint: str = "",
    ) -> None:
        self.what, self.who, self.expected, self.got, self.hint = what, who, expected, got, hint
        Exception.__init__(self, what, who, expected, got, hint)  # not OSError's, which would take them for its own

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: value for name, value in vars(self).items() if name != "what" and not name.startswith("_")}
        return partial(type(self), **fields), (self.what,)  # the fields are keyword-only, so the default way fails

    def __str__(self) -> str:
        parts = [f"{self.who}: {self.what}" if self.who else self.what]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.got:
            parts.append(f"got {self.got}")
        if self.hint:
            parts.append(self.hint)
        return "; ".join(parts)


class OperationAborted(WancollError):
    """An operation was given up because a member was lost (on_failure="raise"); the tensor is untouched."""


class WorldTooSmall(WancollError):
    """Fewer than min_world members are left; tensors are untouched. update_membership() waits for joiners."""


class Evicted(WancollError):
    """This member is no longer in the group; connect again to rejoin as a new one."""


class CollectiveMismatch(WancollError):
    """Members called different collectives at the same place in program order; nothing was changed.

    Attributes:
        calls: member name -> what it called.
    """

    def __init__(self, what: str, *, calls: dict[str, str] | None = None, **fields: str) -> None:
        super().__init__(what, **fields)
        self.calls = calls or {}

    def __str__(self) -> str:
        who_by_call: dict[str, list[str]] = {}
        for who, call in self.calls.items():
            who_by_call.setdefault(call, []).append(who)
        return "; ".join([super().__str__(), *(f"{', '.join(who)}: {call}" for call, who in who_by_call.items())])


class MasterUnreachable(WancollError):
    """No master answered within its deadline; tensors are untouched."""


class OutcomeUnknown(WancollError):
    """A call was open here, and nobody can say whether the others committed it with its input; both buffers are kept.

    Its __cause__ is the error that ended the membership or the connection, where one did.
    """


class PeerDaemonLost(WancollError):
    """The local peer daemon went away or cannot be reached. Nothing was sent; calls that were are OutcomeUnknown."""


class AskedToLeave(WancollError):
    """An operator asked this member, or its daemon, to leave; what was committed counts, and nothing else happened."""


class ProtocolError(WancollError):
    """Bytes or messages that break the protocol, or members whose results differ."""


class ConfigError(WancollError):
    """An argument, option or tensor that cannot be used as it is."""


class ArenaFull(WancollError):
    """There is no memory for a tensor: the arena has no room, or the machine has none free. Nothing was sent."""


class DeviceError(WancollError):
    """A device or the system's memory failed. A tensor that took a committed result has undefined contents then.

    Calls that were open, and not committed here, are OutcomeUnknown.
    """


class TimeoutError(WancollError, builtins.TimeoutError):
    """Not finished in the time given; nothing is lost. The built-in TimeoutError, too.

    Attributes:
        work: the call that goes on, with a wait() of its own; None where there is none.
    """

    work: Any

    def __init__(self, what: str, *, work: Any = None, **fields: str) -> None:
        super().__init__(what, **fields)
        self.work = work

    def __reduce__(self) -> tuple[Any, ...]:
        build, what = super().__reduce__()
        del build.keywords["work"]  # belongs to this process
        return build, what


def without_package(option: str, extra: str, missing: ImportError) -> ConfigError:
    """For a command's *option* that needs what `pip install '.[extra]'` installs."""
    return ConfigError(
        f"{option} needs a package that is not installed", got=str(missing),
        hint=f"run, in the source folder: pip install '.[{extra}]'",
    )  # fmt: skip


# What messages name: all of these errors but TimeoutError, whose work belongs to one process.
_KINDS: tuple[type[WancollError], ...] = (WancollError, *WancollError.__subclasses__())
BY_NAME = {kind.__name__: kind for kind in _KINDS if kind is not TimeoutError}

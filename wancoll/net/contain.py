"""What one connection can do to its process: end itself. Whatever it makes the code raise stops at its own task."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType

import structlog

log = structlog.get_logger("wancoll.contain")

_SHOWN_CHARS = 500
_TRACE_CHARS = 4000


class contained:
    """Serve a connection inside: an exception is logged as a bug, with what came last, and ends here.

    *ended* is told why it is over. Failures that are *expected* are for who serves it, and never come here. A context
    manager; a generator would take three times as long, at each message.
    """

    __slots__ = ("_ended", "_expected", "_newest", "_where")

    def __init__(
        self,
        where: str,
        newest: Callable[[], object],
        ended: Callable[[str], None] = lambda _: None,
        *,
        expected: tuple[type[Exception], ...] = (),
    ) -> None:
        self._where, self._newest, self._ended, self._expected = where, newest, ended, expected

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, bug: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(bug, Exception) or isinstance(bug, self._expected):
            return False
        self._ended(met_a_bug(self._where, self._newest(), bug))
        return True


def met_a_bug(where: str, newest: object, bug: Exception) -> str:
    """Log it, and return why the connection ends. *newest* came last, from *where*."""
    log.error("a bug: a connection is closed", where=where, newest=shown(newest), trace=trace(bug))
    return f"it met a bug here: {type(bug).__name__}"[:_SHOWN_CHARS]


def shown(what: object) -> str:
    """*what*, short enough for a line of the log whatever it is."""
    text = repr(what)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def trace(bug: BaseException) -> str:
    """Where it was raised, the last lines: no values of variables, of which there may be a thousand members' worth."""
    return "".join(traceback.format_exception(bug))[-_TRACE_CHARS:]

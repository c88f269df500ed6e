"""Sets up structlog for the services: stderr, readable on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: str, form: str) -> None:
    """Send all structlog loggers to stderr; *level* and *form* are the options --log-level and --log-format."""
    tty = sys.stderr.isatty()
    console = form == "console" or (form == "auto" and tty)
    renderers: list[structlog.typing.Processor] = (
        [
            structlog.processors.format_exc_info,
            _escape,
            structlog.dev.ConsoleRenderer(colors=tty, exception_formatter=structlog.dev.plain_traceback),
        ]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _escape(
    _logger: structlog.typing.WrappedLogger, _level: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Nothing in it steers the terminal: names and texts come from the network. A traceback keeps its lines."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            kept = "\n" if key == "exception" else ""
            event[key] = "".join(
                c if c.isprintable() or c == kept else c.encode("unicode_escape").decode() for c in value
            )
    return event

"""The extension, which all of the project takes from here: one place says so where it is not built."""

from __future__ import annotations

from wancoll.errors import ConfigError


class NotBuilt(ConfigError, ImportError):
    """There is no C engine to import."""


try:
    from wancoll._native import ffi, lib
except ImportError as missing:
    raise NotBuilt(
        "the C engine is not built", got=str(missing), hint="run, in the source folder: pip install ."
    ) from missing

__all__ = ["NotBuilt", "ffi", "lib"]

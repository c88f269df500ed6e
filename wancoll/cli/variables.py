"""Options from the environment, WANCOLL_..., and word of those that only look as if they were some."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cyclopts import App, ArgumentCollection
from cyclopts.config import Env

_PREFIX = "WANCOLL_"
_ALIKE = 0.8  # by difflib's ratio, without prefix and underscores
# Of other commands, and alike to an option of a service: all may be set in one place.
_OTHERS = frozenset({"WANCOLL_RELAYS", "WANCOLL_SECURE", "WANCOLL_SILENCE_TIMEOUT", "WANCOLL_SITES"})

misspelt: dict[str, str] = {}  # for the command that runs: variables that it does not read, and what was meant


class Variables(Env):
    """WANCOLL_... for each option, but where it shows none: what was set for other commands must not decide that."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what the command line leaves open."""
        open_to = [one for one in arguments if one.parameter.show_env_var is not False]
        names = [name for one in open_to if one.parse for name in one.names]
        misspelt.clear()
        misspelt.update(alike(os.environ, map(variable, names)))
        super().__call__(app, commands, ArgumentCollection(open_to))  # type: ignore[no-untyped-call]


def variable(option: str) -> str:
    """The environment variable of "--option"."""
    return _PREFIX + option.removeprefix("--").replace("-", "_").upper()


def alike(given: Iterable[str], read: Iterable[str]) -> dict[str, str]:
    """Those of *given* that are not *read* and look like one that is, with that one."""
    known = {_bare(one): one for one in read}
    unread = set(given) - set(known.values()) - _OTHERS
    found = {}
    for name in sorted(one for one in unread if one.startswith(_PREFIX)):
        from difflib import get_close_matches

        if near := get_close_matches(_bare(name), known, 1, _ALIKE):
            found[name] = known[near[0]]
    return found


def _bare(name: str) -> str:
    return name.removeprefix(_PREFIX).replace("_", "")

"""`wancoll status --bundle`: all that helps to find a fault afterwards, in one JSON file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from wancoll.cli.asking import Asking
from wancoll.cli.looking import doctor, trace
from wancoll.errors import ConfigError, WancollError
from wancoll.limits import package_version
from wancoll.local import default_socket
from wancoll.wire.messages import Status

_SECONDS = 2.0  # of the trace


def write(
    file: str, told: dict[str, Any], answer: Status, masters: list[str], sockets: Sequence[str], asking: Asking
) -> str:
    """Write what `status --json` has *told*, a trace of the daemons at *sockets*, and what `wancoll doctor` says.

    Returns what is in it, for people. Raises ConfigError: the file cannot be written.
    """

    def traced(path: str) -> Any:
        try:
            return trace.ask(path, _SECONDS, asking.timeout)
        except WancollError as bad:
            return bad

    paths = list(dict.fromkeys(sockets or (default_socket(),)))
    with ThreadPoolExecutor(len(paths)) as pool:
        answers = dict(zip(paths, pool.map(traced, paths), strict=True))
    rows = {one[0]: one[1] for one in answers.values() if isinstance(one, tuple)}
    missing = {path: str(one) for path, one in answers.items() if isinstance(one, WancollError)}
    elsewhere = "no socket that answered is its own: run this on its machine, too, or give --socket"
    missing |= {host.name: elsewhere for host in answer.hosts if host.name not in rows}
    found = {
        "wancoll": package_version(),
        "at": time.time(),
        "status": told,
        "doctor": [asdict(one) for one in doctor.findings(doctor.PLANS, masters, asking)],
        "trace": msgspec.to_builtins(trace.timeline_of(one for one in answers.values() if isinstance(one, tuple))),
        "not_traced": missing,
    }
    try:
        Path(file).write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as bad:
        raise ConfigError("cannot be written", who=f"--bundle {file}", got=str(bad)) from bad
    return f"status, events, doctor and a trace of {', '.join(sorted(rows)) or 'no daemon'} in {file}"

"""A relay that tampers: `python evil.py FILE OPTIONS...` is `wancoll relay OPTIONS...`, and attacks as FILE says, once.

FILE holds the kind of an attack (see tests.faults.attacks.tampered), and is removed when that was done.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is run as a program

from tests.faults.attacks import Records, split, tampered
from wancoll.cli.main import run
from wancoll.relay.switch import Switch

_WORTH = 16384  # bytes of a piece that is attacked: data, not a handshake
_asked = Path(sys.argv[1])
_overheard: list[tuple[Any, bytes]] = []  # the last record of some splice, and whose it was


def _attack(data: bytes, whose: Any) -> bytes:
    """*data*, after the attack that is asked for, if there is one and it is worth it."""
    if len(data) < _WORTH or not _asked.exists():
        return data
    other = next((record for source, record in _overheard if source is not whose), b"")
    changed = tampered(data, _asked.read_text(), 0.5, other)
    if changed != data:
        _asked.unlink(missing_ok=True)
    return changed


async def _carry(_: Switch, source: Any, to: Any, splice: trio.CancelScope) -> None:
    records = Records()
    with contextlib.suppress(OSError):
        while data := await source.recv(1 << 18):
            if data := records.whole(data):
                last, data = [*split(data)][-1], _attack(data, source)
                _overheard[:] = [*_overheard[-7:], (source, last)]
            while data:
                data = data[await to.send(data) :]
    splice.cancel()


Switch._carry = _carry  # type: ignore[method-assign]
if __name__ == "__main__":
    run(["relay", *sys.argv[2:]])

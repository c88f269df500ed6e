"""Fuzzing that looks at coverage, with atheris: python -m tests.fuzz.guided decoders|master|peer CORPUS... [-runs=N].

Arguments after the target are libFuzzer's; the first corpus is where it puts what it finds. Beside this file lies a
small one for each target, which tests replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

LONGEST = 64  # messages of one input; what is fuzzed is imported late, so that atheris sees it


def of_decoders(data: bytes) -> None:
    """A body, and a connection's bytes."""
    from tests.fuzz import decoders

    decoders.one(data)
    decoders.stream(data)


def of_master(data: bytes) -> None:
    """What is said to a master, as the bytes choose it."""
    from tests.fuzz import master
    from tests.fuzz.absurd import Read

    chance = Read(data[1:])
    room = master.Master(chance, inside=bool(data[:1] and data[0] % 2))
    for _ in range(LONGEST // 8):
        if chance.over:
            break
        room.sequence(8)


def of_peer(data: bytes) -> None:
    """What a member hears, as the bytes choose it."""
    from tests.fuzz import peer
    from tests.fuzz.absurd import Read

    peer.run(Read(data), 1, LONGEST)


TARGETS: dict[str, Callable[[bytes], None]] = {"decoders": of_decoders, "master": of_master, "peer": of_peer}


def main() -> None:
    """See the module."""
    import atheris

    target = TARGETS[sys.argv.pop(1)]
    with atheris.instrument_imports(include=["wancoll", "wancoll_master"]):
        target(b"")
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

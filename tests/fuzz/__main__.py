"""Hostile input for as long as one likes: python -m tests.fuzz --inputs 10000000 --sequences 1000000.

Prints the seed of what fails; `--seed` says it again.
"""

from __future__ import annotations

import argparse
import gc
import time

from tests.fuzz import decoders, master, peer
from tests.fuzz.absurd import Drawn
from wancoll.resources import of_this_process

_BATCH = 400
_GROWTH = 32 << 20  # bytes that a process may take more after the first tenth of a run


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--inputs", type=int, default=10_000_000, help="of the decoders")
    options.add_argument(
        "--sequences", type=int, default=1_000_000, help="of messages, for both state machines together"
    )
    options.add_argument("--seed", type=int, default=1, help="the first one")
    chosen = options.parse_args()
    began = time.monotonic()
    made = taken = 0
    seed = chosen.seed
    while made < chosen.inputs:
        more, understood = decoders.run(seed, min(100_000, chosen.inputs - made))
        made, taken, seed = made + more, taken + understood, seed + 1
    print(f"{made} inputs of the decoders, {taken} understood, {time.monotonic() - began:.0f} s", flush=True)
    began, said, memory = time.monotonic(), 0, 0
    seed = chosen.seed
    while said < chosen.sequences:
        try:
            master.run(Drawn(seed), _BATCH, voters=0 if seed % 2 else 32)
            peer.run(Drawn(seed), _BATCH)
        except BaseException:
            print(f"--seed {seed} fails", flush=True)
            raise
        said, seed = said + 2 * _BATCH, seed + 1
        gc.collect()
        if not memory and said >= chosen.sequences // 10:
            memory = of_this_process()["memory"]
    grown = of_this_process()["memory"] - memory
    print(f"{said} sequences, {time.monotonic() - began:.0f} s, {grown >> 10} KiB more than after the first tenth")
    assert grown < _GROWTH, "memory grew"


if __name__ == "__main__":
    main()

"""`wancoll demo`: options to the demo's plan, its outcome to a table and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.config import Env

from wancoll.options import Seconds, Seed, Switch, between
from wancoll.process import exit_on_sigterm

MOST_PEERS = 16  # a process each for daemon and training, on one machine
LEAST_STEPS = 40


demo = App(
    name="demo",
    config=Env("WANCOLL_DEMO_", command=False),  # names like steps and seed are too common for WANCOLL_STEPS
    help_epilogue=(
        "Exit code 0 only if all members that are left hold the same bytes, no step was lost, and the test accuracy is "
        "within 1 point of a single process on the same data."
    ),
)


@demo.default
def run(
    *,
    peers: Annotated[int, Parameter(validator=between(2, MOST_PEERS))] = 4,
    steps: Annotated[int, Parameter(validator=between(LEAST_STEPS, 1000000))] = 800,
    seed: Seed = 0,
    silence_timeout: Seconds = 60.0,
    secure: Switch = False,
) -> int:
    """Train a small network on local peers, kill one in the middle of an all-reduce, let another one join.

    Args:
        peers: Peers at the start. Each is a daemon and a training process on this machine.
        steps: Steps of training, of 128 samples each. The kill comes half way, the join after 3 quarters.
        seed: Seed of the first parameters and of the batches. The same seed ends in the same bytes.
        silence_timeout: Seconds without a word from any training process after which the demo gives up.
        secure: All that peers say goes over TLS, tensors too.
    """
    from wancoll.demo.data import BATCH, check_extra

    check_extra()
    from rich.console import Console

    from wancoll.demo.director import DemoPlan, play
    from wancoll.demo.show import Show

    plan = DemoPlan(peers, steps, seed, silence_timeout, secure)
    console = Console(markup=False, highlight=False)
    console.print(
        f"A small network learns handwritten digits in {steps} steps of {BATCH} samples, spread over {peers} peers on "
        f"this machine. One is killed in step {plan.kill_in}, another joins before step {plan.join_before}. A single "
        "process does the same for comparison."
        + (" The newcomer comes with the cluster's token; all goes over TLS." if secure else ""),
        soft_wrap=not console.is_terminal,
    )
    exit_on_sigterm()
    outcome = play(plan, Show(console, steps))
    reasons = list(outcome.reasons_to_fail())
    console.print()
    console.print(outcome.table())
    for reason in reasons:
        print(f"wancoll demo: failed: {reason}", file=sys.stderr)
    return 1 if reasons else 0

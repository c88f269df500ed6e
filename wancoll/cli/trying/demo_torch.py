"""`wancoll demo torch`: options to two runs of the examples' story; a table, a picture, an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.config import Env

from wancoll.errors import ConfigError
from wancoll.options import between, check_picture
from wancoll.process import exit_on_sigterm
from wancoll.units import format_bytes, format_rate, parse_rate

LEAST_STEPS = 30
HEADS = 4

torch = App(
    name="torch",
    config=Env("WANCOLL_DEMO_TORCH_", command=False),
    help_epilogue=(
        "Exit code 0 only if, in both runs, all members that are left hold the same bytes, no step was lost, and the "
        "loss fell. About two minutes on two cores that do nothing else; fewer --steps take less."
    ),
)


@torch.default
def run(
    *,
    peers: Annotated[int, Parameter(validator=between(3, 8))] = 4,
    steps: Annotated[int, Parameter(validator=between(LEAST_STEPS, 1000000))] = 90,
    rate: str = "80Mbit/s",
    layers: Annotated[int, Parameter(validator=between(1, 64))] = 4,
    hidden: Annotated[int, Parameter(validator=between(HEADS, 4096))] = 128,
    batch: Annotated[int, Parameter(validator=between(1, 4096))] = 32,
    picture: Path = Path("wancoll-demo-torch.png"),
) -> int:
    """Train a small transformer over slow links, by data parallel and by DiLoCo; kill a peer, and let another one join.

    The text is Python's own help pages, byte by byte. Both runs take the same steps on the same samples, but for those
    of members that are not there.

    Args:
        peers: Peers. Each is a daemon and a training process on this machine.
        steps: Steps of each run. The kill comes after a third of them.
        rate: What a link carries, each way; unit B/s or bit/s with k, M, G. It adds up to 20 ms.
        layers: Of the transformer.
        hidden: Its width, a multiple of 4; it has as many heads.
        batch: Samples of 64 bytes in a step.
        picture: Path of the PNG with the loss curves; overwritten.
    """
    from wancoll.demo.data import check_extra

    check_extra("wancoll demo torch", "demo,torch", torch="torch (the model)")
    check_picture(picture, what="--picture")
    link = parse_rate(rate, "--rate")
    if hidden % HEADS:
        raise ConfigError("no width", who="--hidden", expected=f"a multiple of {HEADS}", got=str(hidden))
    from rich.console import Console

    from wancoll.demo.curves import draw
    from wancoll.demo.transformer import table, train
    from wancoll.examples.shared.arguments import Options
    from wancoll.examples.shared.model import count, transformer

    options = Options(world=peers, steps=steps, layers=layers, hidden=hidden, heads=HEADS, batch=batch, dtype="float32")
    console = Console(markup=False, highlight=False)
    size = count(transformer(options))
    console.print(
        f"A transformer of {size:,} parameters ({format_bytes(4 * size)}) learns Python's help pages on {peers} peers, "
        f"whose links carry {format_rate(link)} each way: {steps} steps of data parallel, and {steps} of DiLoCo. In "
        "each run one peer is killed, and another one joins.",
        soft_wrap=not console.is_terminal,
    )
    exit_on_sigterm()
    runs = train(options, link, console)
    reasons = [reason for each in runs for reason in each.reasons_to_fail(steps)]
    console.print()
    console.print(table(runs))
    draw(runs, f"{peers} peers, {size:,} parameters, links of {format_rate(link)}", str(picture))
    console.print(f"\nloss curves: {picture}")
    for reason in reasons:
        print(f"wancoll demo torch: failed: {reason}", file=sys.stderr)
    return 1 if reasons else 0

"""What one rank found out, and the table that is made of it: measured, and by the textbook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wancoll.examples.shared.arguments import Options
from wancoll.examples.shared.model import count, transformer
from wancoll.limits import counted
from wancoll.units import format_bytes


@dataclass(slots=True)
class Report:
    """What one rank found out."""

    losses: list[float]  # of each step, over the whole batch
    sent: float  # bytes that this rank sent in a step, measured
    sent_formula: tuple[float, str]  # the same by the textbook, and as text
    memory: tuple[float, float, float]  # bytes of weights, gradients and optimizer, as this rank held them
    memory_formula: tuple[float, float, float]  # the same by the textbook
    rows: list[tuple[str, str, str]] = field(default_factory=list)  # more of the table: name, measured, textbook


def show(title: str, report: Report, alone: Sequence[float], options: Options, world: int) -> bool:
    """Print the table; whether the losses are those of a single process."""
    parameters = count(transformer(options))
    steps = counted(len(report.losses), "step")
    print(f"{title}: {counted(world, 'rank')}, {parameters:,} parameters of {options.dtype}, {steps}\n")
    formula, words = report.sent_formula
    sent = f"{format_bytes(report.sent)}" if report.sent == report.sent else "not counted"
    lines = [("of the busiest rank", "measured", "textbook")]
    lines.append(("bytes sent a step", sent, f"{format_bytes(formula)} = {words}"))
    for name, have, want in zip(
        ("weights", "gradients", "optimizer"), report.memory, report.memory_formula, strict=True
    ):
        lines.append((name, format_bytes(have), format_bytes(want)))
    lines += report.rows
    apart = max(abs(a - b) / b for a, b in zip(report.losses, alone, strict=True))
    lines.append(("first and last loss", f"{report.losses[0]:.4f} {report.losses[-1]:.4f}", "a single process:"))
    lines.append(("", "", f"{alone[0]:.4f} {alone[-1]:.4f}"))
    for name, measured, textbook in lines:
        print(f"{name:<22}{measured:>20}   {textbook}")
    right = apart <= (0.02 if options.dtype == "bfloat16" else 1e-3)  # two bytes are rounded before they are summed up
    print(f"\nlosses differ by {100 * apart:.3f} % at most: {'right' if right else 'WRONG'}", flush=True)
    return right

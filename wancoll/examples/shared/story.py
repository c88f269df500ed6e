"""What happened to members of which one is killed and another one joins, and what is wrong with it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from wancoll.examples.shared.arguments import Options
from wancoll.units import format_bytes


@dataclass(frozen=True, slots=True)
class Told:
    """A step, as one member saw it; those of its last step have its weights' digest."""

    member: str
    step: int
    loss: float
    contributors: tuple[str, ...]
    sent: int  # bytes
    digest: str = ""


@dataclass(slots=True)
class Story:
    """What happened: all that was told, in order, who was killed, and who came."""

    told: list[Told]
    victim: str = ""
    newcomer: str = ""

    def of(self, member: str) -> list[Told]:
        """What this one told."""
        return [each for each in self.told if each.member == member]

    @property
    def survivors(self) -> list[str]:
        """The members that were there at the end."""
        return [name for name in dict.fromkeys(each.member for each in self.told) if name != self.victim]

    @property
    def worlds(self) -> str:
        """The world's sizes, one after the other: "4 -> 3 -> 4"."""
        sizes = itertools.groupby(len(each.contributors) for each in self.of(self.survivors[0]))
        return " -> ".join(str(size) for size, _ in sizes)

    @property
    def losses(self) -> list[float]:
        """The mean loss of the members, for each step."""
        ordered = sorted(self.told, key=lambda each: each.step)
        steps = (list(told) for _, told in itertools.groupby(ordered, key=lambda each: each.step))
        return [sum(each.loss for each in step) / len(step) for step in steps]

    @property
    def faults(self) -> list[str]:
        """What should not have been."""
        found = []
        last = [self.of(name)[-1] for name in self.survivors]
        if len({each.digest for each in last}) != 1 or not last[0].digest:
            found.append("the replicas differ")
        if self.newcomer not in last[0].contributors or self.victim in last[0].contributors:
            found.append("nobody joined, or nobody was killed")
        for name in self.survivors:
            steps = [each.step for each in self.of(name)]
            if any(b <= a for a, b in itertools.pairwise(steps)):
                found.append(f"{name} took a step twice")
            if any(b > a + 1 for a, b in itertools.pairwise(steps)) or (name != self.newcomer and steps[0] != 1):
                found.append(f"{name} lost a step")
        return found

    def show(self, title: str, alone: Sequence[float], options: Options, formula: str, points: float) -> bool:
        """Print the table; whether all went well, and the loss is at most *points* percent from a single process's."""
        mine = self.of(self.survivors[0])
        last = [sum(some[-8:]) / len(some[-8:]) for some in (self.losses, alone)]
        apart = 100 * abs(last[0] - last[1]) / last[1]
        print(f"{title}: {self.victim} is killed, {self.newcomer} joins\n")
        for name, measured, expected in (
            ("", "measured", "expected"),
            ("members", self.worlds, f"{options.world} -> {options.world - 1} -> {options.world}"),
            ("steps", str(len(mine)), str(options.steps)),
            ("bytes sent a step", format_bytes(sum(each.sent for each in mine) / len(mine)), formula),
            ("loss of the last 8", f"{last[0]:.4f}", f"{last[1]:.4f}, a single process"),
        ):
            print(f"{name:<22}{measured:>20}   {expected}")
        faults = self.faults + ([f"the losses are {apart:.1f} % apart"] if apart > points else [])
        print(f"\n{'; '.join(faults) or f'all replicas hold the same bytes; losses {apart:.2f} % apart: right'}")
        return not faults

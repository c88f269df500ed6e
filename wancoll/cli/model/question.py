"""What `wancoll model` is asked: which algorithms, over which links. Tables and the map answer it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from wancoll.errors import ConfigError
from wancoll.schedule.cost import HALVED, LinkCost, Sites, crossover, lower_bound, seconds
from wancoll.schedule.training import all_reduce_twice
from wancoll.units import format_bytes, format_rate

Alpha = Annotated[str, Parameter(help="Time of one message over one hop, unit ns, us, ms or s.")]
Bandwidth = Annotated[
    str, Parameter(help="Bandwidth of a member's link, each way, unit B/s or bit/s with k, M, G, T, Ki, Mi or Gi.")
]
EXTRA = {
    "bound": "the least time, of bytes that every member has to receive whatever the algorithm",
    "bytes": "these bytes",
    "2S": "a ring's all_reduce by the rule of thumb that a member sends 2 S",
    "root": "the bandwidth that naive's root needs to be at the bound",
}  # columns that are no algorithm; those called ALGORITHM/bound say how far it is above the bound


@dataclass(frozen=True)
class Question:
    """What is compared: the names in the order of the columns, and what links cost."""

    names: tuple[str, ...]
    cost: LinkCost
    bandwidth: float  # bytes per second, as it was given
    sites: int = 0
    inside: LinkCost | None = None
    kind: str = "all_reduce"
    root: float = 0.0  # bytes per second of naive's root; 0: as the others

    def seconds(self, name: str, nbytes: float, world: int) -> float:
        """Classic time of one algorithm."""
        time = seconds(name, nbytes, world, self.cost, sites=self._sites(world), kind=self.kind)
        if name == "naive" and self.root and world > 1:
            # All others' tensors come through the root's link, and each other one's through its own.
            time += 2 * nbytes * (max((world - 1) / self.root, self.cost.beta) - (world - 1) * self.cost.beta)
        return time

    def crossover(self, pair: tuple[str, str], world: int) -> float | None:
        """Bytes at which the two are equal."""
        return crossover(*pair, world, self.cost, sites=self._sites(world))

    def times(self, nbytes: int, world: int) -> dict[str, float]:
        """Seconds of every algorithm, in the order of the columns."""
        return {name: self.seconds(name, nbytes, world) for name in self.names}

    def extra(self, column: str, nbytes: int, world: int) -> float:
        """What stands in a column that is no algorithm: seconds, bytes, bytes per second, or times the bound."""
        least = lower_bound(self.kind, nbytes, world)
        match column.partition("/"):
            case "bound", _, _:
                return least * self.cost.beta
            case "bytes", _, _:
                return least
            case "2S", _, _:
                return all_reduce_twice(nbytes, world, self.cost)
            case "root", _, _:  # (K-1) S each way in the time of (K-1)/K S
                return world * self.bandwidth
            case name, _, _:
                bound = least * self.cost.beta
                return self.seconds(name, nbytes, world) / bound if bound else 1.0

    def _sites(self, world: int) -> Sites | None:
        if self.inside is None:
            return None
        count = min(self.sites, world)
        base, more = divmod(world, count)
        return Sites(tuple(base + (i < more) for i in range(count)), self.inside)


def column_names(kind: str, algorithms: tuple[str, ...]) -> list[str]:
    """All columns that there can be for one kind."""
    names = [name for name in algorithms if kind == "all_reduce" or name in HALVED]
    extra = EXTRA if kind == "all_reduce" else ("bound", "bytes")
    return [*names, *extra, *(f"{name}/bound" for name in names)]


def named_columns(text: str, known: Collection[str]) -> list[str]:
    """The names in *text*, with commas between."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = next((name for name in names if name not in known or names.count(name) > 1), None)
    if wrong is not None:
        raise ConfigError(
            "no such column, or twice", who="--columns", expected=f"some of {', '.join(known)}", got=repr(wrong),
            hint="it needs --sites" if wrong == "hierarchical" else "",
        )  # fmt: skip
    return names


def shown(column: str, value: float) -> str:
    """The text of a cell: times in milliseconds."""
    match column:
        case "bytes":
            return format_bytes(value)
        case "root":
            return format_rate(value, 4)
        case _:
            return f"{value:.2f}x" if "/" in column else f"{1e3 * value:.3f}"

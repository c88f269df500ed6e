"""What `wancoll model` is asked: which algorithms, over which links. Tables and the map answer it."""

from __future__ import annotations

from dataclasses import dataclass

from wancoll.schedule.cost import LinkCost, Sites, crossover, seconds


@dataclass(frozen=True)
class Question:
    """What is compared: the names in the order of the columns, and what links cost."""

    names: tuple[str, ...]
    cost: LinkCost
    bandwidth: float  # bytes per second, as it was given
    sites: int = 0
    inside: LinkCost | None = None

    def seconds(self, name: str, nbytes: float, world: int) -> float:
        """Classic time of one algorithm."""
        return seconds(name, nbytes, world, self.cost, sites=self._sites(world))

    def crossover(self, pair: tuple[str, str], world: int) -> float | None:
        """Bytes at which the two are equal."""
        return crossover(*pair, world, self.cost, sites=self._sites(world))

    def times(self, nbytes: int, world: int) -> dict[str, float]:
        """Seconds of every algorithm, in the order of the columns."""
        return {name: self.seconds(name, nbytes, world) for name in self.names}

    def _sites(self, world: int) -> Sites | None:
        if self.inside is None:
            return None
        count = min(self.sites, world)
        base, more = divmod(world, count)
        return Sites(tuple(base + (i < more) for i in range(count)), self.inside)

"""How a certificate authority gives way to the next one without a stop, by time alone. Pure.

    steady      one authority is believed, and signs
    spreading   a new one is believed beside it, and whoever is connected is told so; the old one signs
    retiring    the new one signs, and what the old one has signed is believed still
    steady      the old one is forgotten

Each phase between lasts until all certificates that were signed before it have ended. So whoever has not heard of it by
then has none that is good, and comes with its token, over which it learns all. No word of a daemon is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from wancoll.errors import ConfigError

_SETTLE = 60.0  # seconds that a phase goes on where a master begins to lead late in it: daemons have yet to come
_EACH_SETTLE = 4  # at most this part of a phase

Phase = Literal["steady", "spreading", "retiring"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rotation(Generic[T]):
    """A certificate authority, and its replacement while one is under way.

    Raises ValueError: there are more authorities, or fewer, than belong to the phase.
    """

    authorities: tuple[T, ...]  # that are believed, the oldest first
    phase: Phase = "steady"
    since: float = 0.0  # seconds since 1970, when the phase began; 0.0: steady
    until: float = 0.0  # seconds since 1970, when the next one begins
    period: float = 0.0  # seconds that each lasts at least

    def __post_init__(self) -> None:
        expected = 1 if self.phase == "steady" else 2
        if len(self.authorities) != expected:
            raise ValueError(f"{len(self.authorities)} authorities, {expected} expected while {self.phase}")

    @property
    def signs(self) -> T:
        """The one that signs."""
        return self.authorities[0 if self.phase == "spreading" else -1]

    @property
    def newest(self) -> T:
        """The one that will be there longest: tokens name it."""
        return self.authorities[-1]

    @property
    def believed(self) -> tuple[T, ...]:
        """All, that which signs first."""
        return (self.signs, *(one for one in self.authorities if one is not self.signs))

    def begin(self, new: T, now: float, period: float, ends: float) -> Rotation[T]:
        """Begin the first phase, with a *new* authority. Raises ConfigError: another one is under way.

        It lasts *period* seconds, no less than a certificate's lifetime, and at least until *ends*: then the last of
        the certificates that were signed so far is over. *now* and *ends* are seconds since 1970.
        """
        if self.phase != "steady":
            raise ConfigError(
                "a rotation is under way already", who="the authority", expected="one that ended",
                got=f"{self.phase} for {max(0.0, self.until - now):.0f} s more",
                hint="`wancoll ca show` tells of it; where a key was stolen, `wancoll ca rotate --now`",
            )  # fmt: skip
        return Rotation((*self.authorities, new), "spreading", now, max(now + period, ends), period)

    def due(self, now: float) -> bool:
        """Whether the next phase begins."""
        return self.phase != "steady" and now >= self.until

    def next(self, now: float, ends: float) -> Rotation[T]:
        """The next phase; see begin()."""
        if self.phase == "spreading":
            return replace(self, phase="retiring", since=now, until=max(now + self.period, ends))
        return Rotation(self.authorities[1:])

    def taken_up(self, now: float) -> Rotation[T]:
        """By a master that begins to lead *now*: whoever was not told while none led is told before it goes on."""
        least = now + min(_SETTLE, self.period / _EACH_SETTLE)
        return self if self.phase == "steady" or self.until >= least else replace(self, until=least)

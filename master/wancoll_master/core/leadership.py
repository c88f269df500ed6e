"""Until when a master with a lease may lead, and when it renews the lease. Pure: time is an argument.

The lease's keeper counts from when it hears of a renewal, the leader from when it sent for it: whatever the network
does, the leader stops first. Both clocks must run equally fast but for SAFETY.
"""

from __future__ import annotations

from math import inf

SAFETY = 0.1  # share of the lease that is not used
RENEWALS_PER_TTL = 3


class Leadership:
    """One lease of one leader.

    Args:
        ttl: seconds that a renewal holds, as the keeper granted it.
        sent_at: when the lease was asked for.
    """

    def __init__(self, ttl: float, sent_at: float) -> None:
        self.ttl = ttl
        self.until = sent_at + ttl * (1 - SAFETY)
        self._sent_at = sent_at

    def renewed(self, ttl: float, sent_at: float) -> None:
        """The renewal that was sent for at *sent_at* was granted. A late answer counts for little."""
        self.ttl = ttl
        self.until = max(self.until, sent_at + ttl * (1 - SAFETY))
        self._sent_at = max(self._sent_at, sent_at)

    def over(self) -> None:
        """It is lost, or given back."""
        self.until = -inf

    def holds(self, now: float) -> bool:
        """Whether it may lead *now*."""
        return now < self.until

    @property
    def request_timeout(self) -> float:
        """Seconds to wait for an answer before another endpoint is asked."""
        return self.ttl / RENEWALS_PER_TTL

    @property
    def renew_at(self) -> float:
        """When to renew next, if nothing has failed."""
        return self._sent_at + self.ttl / RENEWALS_PER_TTL

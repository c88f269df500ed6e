"""How a collective becomes a call: the result's place, posting, waiting."""

from __future__ import annotations

import time
from typing import Any

from wancoll.client.connection import Connection
from wancoll.client.placement import Placement
from wancoll.client.results import new_result
from wancoll.client.tensors import Region, check_out, region, require_writable
from wancoll.client.work import Work
from wancoll.collective import Descriptor, Receipt
from wancoll.wire.messages import EpochInfo


class Caller:
    """What the collectives share.

    Every call is by the ranks of the epoch that was current when it was made.

    Args:
        connection: to the peer daemon, with a place in the group.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _result(self, call: str, out: Any, source: Region, count: int, shape: tuple[int, ...]) -> tuple[Region, bool]:
        """Where a result of *count* elements goes, and whether that was made for it (with *shape*), as out is None.

        Raises:
            ConfigError: out cannot take it.
        """
        if out is None:
            self._connection.check_usable()
            return new_result(self._connection.arena, shape, source), True
        target = region(out, f"{call}(out=...)")
        check_out(source, target, count, call)
        require_writable(target, f"{call}(out=...)")
        return target, False

    def _start(
        self,
        descriptor: Descriptor,
        place: EpochInfo,
        source: Region | None,
        target: Region | None,
        fresh: bool = False,
        *,
        blocks: dict[str, int] | None = None,
        peer: int = -1,
        tag: int = 0,
        async_op: bool,
        timeout: float | None,
    ) -> Receipt | Work:
        placement = Placement(
            self._connection.arena,
            (source,) if source is not None else (),
            (target,) if target is not None else (),
            fresh=fresh,
        )
        work = Work(
            self._connection, descriptor, place.epoch, placement, target, blocks=blocks, peer=peer, tag=tag
        )  # fmt: skip
        return self._post(work, async_op, timeout)

    def _post(self, work: Work, async_op: bool, timeout: float | None) -> Receipt | Work:
        if async_op:
            self._connection.post(work)
            return work
        return self._run(work, timeout)

    def _run(self, work: Work, timeout: float | None) -> Receipt:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._connection.post(work, deadline)
        return work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

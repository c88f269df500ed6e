"""torchft's process group over wancoll: `Manager(pg=ProcessGroupWancoll(...))`, in place of ProcessGroupGloo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wancoll.torch.names import BACKEND

if TYPE_CHECKING:
    from datetime import timedelta

    Wrapper = object
else:
    from torchft.process_group import ProcessGroupWrapper as Wrapper


class ProcessGroupWancoll(Wrapper):
    """A process group that torchft's Manager configures anew for each of its quorums.

    Without a daemon each quorum starts a master and daemons of its own. With WANCOLL_SOCKET, of a daemon that runs,
    all quorums use that one.
    """

    _quorum_id: int
    _timeout: timedelta

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        from wancoll.torch.backend.process_group import WancollProcessGroup

        name, seconds = f"torchft/{self._quorum_id}", self._timeout.total_seconds()
        return WancollProcessGroup(store, rank, world_size, seconds, name, None, False)

    def getBackendName(self) -> str:
        """The name that torchft shows."""
        return f"torchft-{BACKEND}"

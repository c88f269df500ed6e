"""What a member does when states are brought together. Pure."""

from __future__ import annotations

from typing import Final

MAJORITY: Final = "majority"  # votes, sends and receives
SEND_ONLY: Final = "send-only"  # votes and sends, is never changed
RECEIVE_ONLY: Final = "receive-only"  # has no vote and sends nothing
OVERWRITE: Final = "overwrite"  # so, too, and its tensors may hold anything until all is there
STRATEGIES = (MAJORITY, SEND_ONLY, RECEIVE_ONLY, OVERWRITE)
SILENT = (RECEIVE_ONLY, OVERWRITE)

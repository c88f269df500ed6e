"""What a member does when states are brought together. Pure."""

from __future__ import annotations

MAJORITY = "majority"  # votes, sends and receives
SEND_ONLY = "send-only"  # votes and sends, is never changed
RECEIVE_ONLY = "receive-only"  # has no vote and sends nothing
STRATEGIES = (MAJORITY, SEND_ONLY, RECEIVE_ONLY)

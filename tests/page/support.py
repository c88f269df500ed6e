"""What tests of the page share: a viewer that reads what is told, as a browser does."""

from __future__ import annotations

import json
import re
from typing import Any


def frames(text: bytes) -> list[dict[str, Any]]:
    """The messages in a stream of server-sent events."""
    return [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: ") and line.endswith(b"}")]


def page_of(log: str) -> str:
    """Where a master has its page, by its log."""
    found = re.search(r'"at": "([0-9.:]+)", "event": "page"', log)
    assert found, log
    return found[1]

"""What tests of metrics share: a scrape, read back by prometheus_client's own parser."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
ROW = re.compile(r"^\| `(wancoll_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", re.MULTILINE)

T = TypeVar("T")


class Scrape:
    """A text of metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.types: dict[str, str] = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
        self._values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample with exactly these labels."""
        return self._values[name, tuple(sorted(labels.items()))]

    def all(self, name: str) -> dict[tuple[str, ...], float]:
        """By the values of the labels, in the order of the labels' names."""
        return {tuple(v for _, v in labels): value for (n, labels), value in self._values.items() if n == name}


def documented() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and help of each metric in docs/operations.md."""
    found = ROW.findall(DOCS.read_text())
    return [(name, kind, tuple(filter(None, labels.split(", "))), text) for name, kind, labels, text in found]


def port_of(log: str) -> str:
    """Where a service tells metrics, by its log."""
    found = re.search(r'"at": "([0-9.:]+)", "event": "metrics"', log)
    assert found, log
    return found[1]


def scrape(at: str, token: str = "") -> Scrape:
    """What is told there now: not a text that was made before."""
    before = found = _scrape(at, token)
    while found.value("wancoll_uptime_seconds") == before.value("wancoll_uptime_seconds"):
        time.sleep(0.02)
        found = _scrape(at, token)
    return found


def _scrape(at: str, token: str) -> Scrape:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(f"http://{at}/metrics", headers=headers), timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return Scrape(answer.read().decode())


def until(look: Callable[[], T], good: Callable[[T], bool], seconds: float = 20.0) -> T:
    """The first look that is *good*, or the last one; while a service starts nobody answers."""
    end = time.monotonic() + seconds
    while True:
        try:
            found = look()
            if good(found) or time.monotonic() > end:
                return found
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)

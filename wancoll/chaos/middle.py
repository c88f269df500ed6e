"""The proxy process of a chaos run, seen from the run: where it listens, and its rules."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self

from wancoll.errors import WancollError

_START_SECONDS = 20.0


class Middle:
    """Proxies in front of the data ports of daemons 0, 1, ...: 127.0.0.1 for the first, 127.0.0.2 for the next.

    Start it in a thread that lives as long as it: the kernel ends the process with that thread.

    Args:
        count: of daemons.
        targets: where their data ports are, as (host, port).
    """

    def __init__(self, count: int, targets: list[tuple[str, int]]) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._fired: dict[int, threading.Event] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wancoll.chaos.proxy", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._say({"listen": [f"127.0.0.{i + 1}" for i in range(count)], "targets": targets})
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        if not first:
            raise WancollError("the proxy did not start", who="wancoll chaos", got=f"exit code {self._process.wait()}")
        self.port: int = json.loads(first)["port"]  # the same for all
        self._reader = threading.Thread(target=self._read, name="proxy", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def members(self, index_by_mid: Mapping[int, int]) -> None:
        """Tell which member is of which daemon."""
        self._say({"members": dict(index_by_mid)})

    def add(self, kind: str, source: int, to: int, lane: int = -1, amount: float = 0.0) -> int:
        """Add a rule (see proxy.Rule); returns its number."""
        number = next(self._numbers)
        with self._lock:
            self._fired[number] = threading.Event()
        self._say({"rule": {"id": number, "kind": kind, "source": source, "to": to, "lane": lane, "amount": amount}})
        return number

    def fired(self, number: int, timeout: float) -> bool:
        """Whether the rule has met a lane, waiting for that at most *timeout* seconds."""
        return self._fired[number].wait(timeout)

    def clear(self, number: int) -> None:
        """Take the rule away."""
        self._say({"clear": number})

    def _say(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number = json.loads(line).get("fired")
            with self._lock:
                event = self._fired.get(number)
            if event is not None:
                event.set()

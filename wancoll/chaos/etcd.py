"""An etcd on loopback to break: one member, its data in a temporary folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from wancoll.chaos.process import wait_stopped
from wancoll.errors import ConfigError

_POLL = 0.02  # seconds between looks whether it answers
_TRIES = 3  # to find two ports that stay free until it has bound them


class Etcd:
    """A running etcd. A context manager; it ends with this object, or with this process if it is killed.

    Args:
        binary: of etcd.
        startup_timeout: seconds for it to answer.

    Raises:
        ConfigError: there is no such program, or it does not come up.
    """

    def __init__(self, binary: str = "etcd", *, startup_timeout: float = 20.0) -> None:
        found = shutil.which(binary)
        if found is None:
            raise ConfigError("there is no etcd", who=binary, hint="Debian's package is called etcd-server")
        self._binary, self._startup_timeout = found, startup_timeout
        self._folder = tempfile.mkdtemp(prefix="wancoll-etcd-")
        # The kernel ties a child to the thread that forked it, so this one lives as long as etcd shall.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wancoll-etcd")
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = (0, 0)
        try:
            for left in reversed(range(_TRIES)):
                self._ports = _free_ports()
                try:
                    self.start()
                    return
                except ConfigError:
                    if not left:
                        raise
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, on the ports and the data that it had; returns when it answers.

        Raises:
            ConfigError: it does not come up.
        """
        data, log = os.path.join(self._folder, "data"), os.path.join(self._folder, "log")
        peers = f"http://127.0.0.1:{self._ports[1]}"
        arguments = [
            "--name=one",
            f"--data-dir={data}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=one={peers}",
        ]
        code = (
            "import os, sys; from wancoll.chaos.tether import die_with_parent; "
            "die_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
        )
        command = [sys.executable, "-c", code, str(os.getpid()), self._binary, *arguments]
        with open(log, "ab") as out:
            self._process = self._starter.submit(
                subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            ).result()
        deadline = time.monotonic() + self._startup_timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                with open(log, errors="replace") as text:
                    end = text.read()[-2000:]
                raise ConfigError("etcd does not come up", who=self.url, got=f"the end of its log:\n{end}")
            time.sleep(_POLL)

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=1.0) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid, "etcd", 5.0)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its data. Idempotent."""
        self.kill()
        self._starter.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]

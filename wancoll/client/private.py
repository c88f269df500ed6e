"""A private peer daemon: a child process that lives as long as one connection."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence

import msgspec

from wancoll.errors import ConfigError, PeerDaemonLost
from wancoll.process import Child, end, start
from wancoll.wire import messages as m

START_SECONDS = 30.0
_OF_THE_SERVICE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")  # readiness is this process's to tell
_STOP_SECONDS = 5.0  # after closing its standard input, and again after SIGTERM


class PrivateDaemon:
    """Starts `wancoll peer` and waits until it is ready.

    Args:
        master: "host:port", with standby masters "host:port,host:port".
        options: more options of `wancoll peer`.
        timeout: seconds until it must be ready.

    Attributes:
        socket: path of its client socket.

    Raises:
        PeerDaemonLost: it ended, or was not ready in time; says the end of its log.
    """

    def __init__(self, master: str, options: Sequence[str] = (), timeout: float = START_SECONDS) -> None:
        self._directory = tempfile.mkdtemp(prefix="wancoll-")
        self.socket = os.path.join(self._directory, "peer.sock")
        self._child: Child | None = None
        command = ["wancoll", "peer", "--master", master, "--socket", self.socket, "--watch-stdin", *options]
        environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_SERVICE_MANAGER}
        try:
            # Not tied by the kernel: that would be to the thread that connects, which may end sooner.
            self._child = start("peer", command, self._directory, environment=environment, tied=False)
            self._child.ready(timeout)
        except ConfigError:
            code = self._child.exit_code if self._child is not None else None
            failed = PeerDaemonLost(
                "the private peer daemon did not start",
                who=f"wancoll peer --master {master}",
                expected="a line that starts with 'wancoll peer ready'",
                got=f"it was not ready after {timeout:g} s" if code is None else f"it ended with status {code}",
                hint=f"the end of its log: {self.log_tail() or '(empty)'}",
            )
            self.stop()
            raise failed from None
        except BaseException:
            self.stop()
            raise

    def log_tail(self) -> str:
        """The end of what it logged."""
        return self._child.log_tail().strip() if self._child is not None else ""

    def explain(self, failure: m.Failure) -> m.Failure:
        """*failure* with the end of the log, if it says that the daemon is gone."""
        if failure.error != PeerDaemonLost.__name__:
            return failure
        tail = self.log_tail() or "(empty)"
        hint = f"connect again to rejoin as a new member; the end of the private daemon's log: {tail}"
        return msgspec.structs.replace(failure, hint=hint)

    def stop(self) -> None:
        """End it: close its standard input, then SIGTERM, then SIGKILL; each has seconds. Safe to call again."""
        if self._child is not None:
            self._close_stdin(self._child)
            with contextlib.suppress(ConfigError):
                self._child.wait(_STOP_SECONDS)
            end([self._child], _STOP_SECONDS)
            self._child = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def disown(self) -> None:
        """In a forked child: the daemon is the parent's, whose end must be seen at once."""
        if self._child is not None and self._child.popen is not None:
            self._close_stdin(self._child)
            self._child.popen.returncode = 0  # not ours to wait for
            self._child = None

    @staticmethod
    def _close_stdin(child: Child) -> None:
        if child.popen is not None and child.popen.stdin is not None:
            child.popen.stdin.close()

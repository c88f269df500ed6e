"""A private peer daemon: a child process that lives as long as one connection."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec

from wancoll.errors import ConfigError, PeerDaemonLost
from wancoll.wire import messages as m

START_SECONDS = 30.0
_STARTED = b"wancoll peer started"
_NOT_ITS_OWN = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),  # readiness is this process's to tell
    *("WANCOLL_SOCKET", "WANCOLL_LISTEN", "WANCOLL_ADVERTISE"),  # of the daemon that the machine has
)
_WRONG_OPTION = 2  # exit status of a command that was called wrongly
_STOP_SECONDS = 5.0  # after closing its standard input, and again after SIGTERM
_TAIL_BYTES = 2000


class PrivateDaemon:
    """Starts `wancoll peer` and waits until clients can attach.

    Args:
        master: "host:port", with standby masters "host:port,host:port".
        options: more options of `wancoll peer`.
        timeout: seconds until it must have started.

    Attributes:
        socket: path of its client socket.

    Raises:
        ConfigError: it refuses its options; says the end of its log.
        PeerDaemonLost: it ended, or had not started in time; says the end of its log.
    """

    def __init__(self, master: str, options: Sequence[str] = (), timeout: float = START_SECONDS) -> None:
        self.master = master
        self._directory = tempfile.mkdtemp(prefix="wancoll-")
        self.socket = os.path.join(self._directory, "peer.sock")
        self._log = os.path.join(self._directory, "peer.log")
        self._process: subprocess.Popen[bytes] | None = None
        command = [
            sys.executable,
            "-m",
            "wancoll",
            "peer",
            "--master",
            master,
            "--socket",
            self.socket,
            "--watch-stdin",
        ]
        try:
            with open(self._log, "wb") as log:
                # A session of its own: Ctrl-C is for this process, which then leaves in its own time.
                self._process = subprocess.Popen(
                    [*command, *options],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=_environment(),
                    start_new_session=True,
                )
            self._await_started(self._process, timeout)
        except BaseException:
            self.stop()
            raise

    def _await_started(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        assert process.stdout is not None
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        said = b""
        while (left := deadline - time.monotonic()) > 0:
            if not poll.poll(left * 1000):
                break
            data = os.read(process.stdout.fileno(), 4096)
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)
                raise self._failed(f"it ended with status {process.poll()}")
            said += data
            if any(line.startswith(_STARTED) for line in said.split(b"\n")[:-1]):
                return
        raise self._failed(f"it had not started after {timeout:g} s")

    def _failed(self, got: str) -> ConfigError | PeerDaemonLost:
        wrong = self._process is not None and self._process.poll() == _WRONG_OPTION  # no other try would do better
        return (ConfigError if wrong else PeerDaemonLost)(
            "the private peer daemon did not start",
            who=f"wancoll peer --master {self.master}",
            expected=f"a line that starts with {_STARTED.decode()!r}",
            got=got,
            hint=f"the end of its log: {self.log_tail() or '(empty)'}",
        )

    def log_tail(self) -> str:
        """The end of what it logged."""
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def explain(self, failure: m.Failure) -> m.Failure:
        """*failure* with the end of the log, if it says that the daemon is gone."""
        if failure.error != PeerDaemonLost.__name__:
            return failure
        tail = self.log_tail() or "(empty)"
        hint = f"connect again to rejoin as a new member; the end of the private daemon's log: {tail}"
        return msgspec.structs.replace(failure, hint=hint)

    def stop(self) -> None:
        """End it: close its standard input, then SIGTERM, then SIGKILL; each has seconds. Safe to call again."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            for more in (process.terminate, process.kill, None):
                try:
                    process.wait(_STOP_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if more is not None:
                        more()
            process.stdout.close()
            self._process = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def disown(self) -> None:
        """In a forked child: the daemon is the parent's, whose end must be seen at once."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.returncode = 0  # not ours to wait for
            self._process = None


def _environment() -> dict[str, str]:
    """This process's, without what is another daemon's; and a name that tells what it is."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_ITS_OWN}
    return {**kept, "WANCOLL_NAME": f"{socket.gethostname()[:60]}-private-{secrets.token_hex(3)}"}

"""Private daemons and masters: child processes that live as long as what they were started for."""

from __future__ import annotations

import atexit
import functools
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

import msgspec

from wancoll.errors import ConfigError, PeerDaemonLost
from wancoll.local import OwnFolder
from wancoll.process import Child
from wancoll.wire import messages as m

START_SECONDS = 30.0
_UNUSED_SECONDS = 5.0  # without a daemon, after which a private master ends
_DIRECTORY = "{directory}"  # in a command: its own folder
_NOT_ITS_OWN = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),  # readiness is this process's to tell
    *("WANCOLL_SOCKET", "WANCOLL_LISTEN", "WANCOLL_ADVERTISE", "WANCOLL_METRICS"),  # of the daemon that the machine has
    "WANCOLL_STATE",  # the same
)
_INVITES = "wancoll peer --join "  # how a master's line with a token begins
_WRONG_OPTION = 2  # exit status of a command that was called wrongly
_STOP_SECONDS = 5.0  # after closing its standard input, and again after SIGTERM
_TAIL_LINES = 20


class _Private:
    """A command that this process started: `wancoll *command`, where DIRECTORY stands for a folder of its own.

    It is *label* in errors, and can be used, within *timeout* seconds, when it has said a line "wancoll NAME WORD ...".
    The *environment* has what is secret, which others of the machine could read in the command.

    Raises:
        ConfigError: it refuses its options; says the end of its log.
        PeerDaemonLost: it ended, or had not started in time; says the end of its log.
    """

    def __init__(
        self, label: str, command: Sequence[str], word: str, timeout: float, environment: Mapping[str, str] = {}
    ) -> None:
        self._label = label
        self._process: subprocess.Popen[bytes] | None = None
        self._own = OwnFolder()
        self._directory = self._own.path
        self._out, log = (os.path.join(self._directory, f"{command[0]}.{end}") for end in ("out", "log"))
        with _numbering:
            taken = {each.number for each in _alive if type(each) is type(self)}
            self.number: int = min(set(range(1, len(taken) + 2)) - taken)  # among those of its kind, from 1
            _alive.add(self)
        arguments = [each.replace(_DIRECTORY, self._directory) for each in command]
        opened = functools.partial(open, mode="wb", opener=functools.partial(os.open, mode=0o600))
        try:
            with opened(self._out) as stdout, opened(log) as stderr:
                # A session of its own: Ctrl-C is for this process, which then leaves in its own time.
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", "wancoll", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=stdout,
                    stderr=stderr,
                    env={**_environment(self.number), **environment},
                    start_new_session=True,
                )
            self._child = Child(self._who, process.pid, process.poll, self._out, log)
            self.said = self._await_started(f"wancoll {command[0]} {word}", word, timeout)  # the rest of that line
        except BaseException:
            self.stop()
            raise

    def _await_started(self, started: str, word: str, timeout: float) -> str:
        try:
            return self._child.said(word, timeout)
        except ConfigError:
            code = self._child.exit_code
        wrong = code == _WRONG_OPTION  # no other try would do better
        raise (ConfigError if wrong else PeerDaemonLost)(
            f"the private {self._label} did not start",
            who=self._who,
            expected=f"a line that starts with {started!r}",
            got=f"it had not started after {timeout:g} s" if code is None else f"it ended with status {code}",
            hint=f"the end of its log: {self.log_tail() or '(empty)'}",
        )

    @property
    def _who(self) -> str:
        return f"wancoll {self._label}"

    def log_tail(self) -> str:
        """The end of what it logged."""
        return self._child.log_tail(_TAIL_LINES).strip()

    def stop(self) -> None:
        """End it: close its standard input, then SIGTERM, then SIGKILL; each has seconds. Safe to call again."""
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            self._stop(process)
            self._process = None  # last: whoever was interrupted does it again
        self._own.close()
        _alive.discard(self)

    def _let_go(self) -> subprocess.Popen[bytes] | None:
        """Close its standard input, and do not end it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
        return process

    leave = stop

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        for more in (process.terminate, process.kill, None):
            try:
                process.wait(_STOP_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if more is not None:
                    more()

    def disown(self) -> None:
        """In a forked child: it is the parent's, whose end must be seen at once."""
        if (process := self._let_go()) is not None:
            process.returncode = 0  # not ours to wait for


class PrivateDaemon(_Private):
    """Starts `wancoll peer` and waits until clients can attach at its *socket*; raises what _Private does.

    It joins with *token*; "": with $WANCOLL_JOIN, if that is set.
    """

    def __init__(
        self, master: str, options: Sequence[str] = (), timeout: float = START_SECONDS, token: str = ""
    ) -> None:  # fmt: skip
        self.master = master
        command = ["peer", "--master", master, "--socket", f"{_DIRECTORY}/peer.sock", "--watch-stdin"]
        command += ["--state", f"{_DIRECTORY}/state", *options]
        joins = {"WANCOLL_JOIN": token} if token else {}
        super().__init__("peer daemon", command, "started", timeout, joins)
        self.socket = os.path.join(self._directory, "peer.sock")

    @property
    def _who(self) -> str:
        return f"wancoll peer --master {self.master}"

    def explain(self, failure: m.Failure) -> m.Failure:
        """*failure* with the end of the log, if it says that the daemon is gone."""
        if failure.error != PeerDaemonLost.__name__:
            return failure
        tail = self.log_tail() or "(empty)"
        hint = f"connect again to rejoin as a new member; the end of the private daemon's log: {tail}"
        return msgspec.structs.replace(failure, hint=hint)


class PrivateMaster(_Private):
    """Starts `wancoll master` for one run: without a journal. It ends when its last daemon has been gone for a while.

    So it outlives this process as long as others need it, and no longer: the folder of its key is its own. The
    system chooses its *port*. *token* is to join it with; "": none is needed, as on loopback. Raises what _Private
    does.
    """

    def __init__(self, listen: str, timeout: float = START_SECONDS) -> None:
        command = ["master", "--first", "--listen", listen, "--journal", "none"]
        command += ["--end-when-unused", str(_UNUSED_SECONDS)]
        super().__init__("master", command, "ready", timeout)
        with open(self._out, encoding="utf-8") as lines:
            invites = [line.removeprefix(_INVITES).strip() for line in lines if line.startswith(_INVITES)]
        self.token = next(iter(invites), "")
        self.port = int(self.said.split()[0].rpartition(":")[2])

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        super()._stop(process)

    def leave(self) -> None:
        """Let it end by itself."""
        if (process := self._let_go()) is not None:
            threading.Thread(target=process.wait, name="wancoll-reaper", daemon=True).start()
        self._own.close()
        _alive.discard(self)


def _environment(number: int) -> dict[str, str]:
    """This process's, without what is another daemon's; and a name that tells whose it is."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_ITS_OWN}
    return {**kept, "WANCOLL_NAME": name_of(sys.argv[0], number)}


def name_of(script: str, number: int) -> str:
    """Name of this process's private daemon with that *number*: the host, the script and the process, the same again.

    The last part tells containers with one host name and their own process numbers apart.
    """
    folder, file = os.path.split(script)
    plain = os.path.basename(folder) if file == "__main__.py" else file.removesuffix(".py")
    words = re.sub("[^A-Za-z0-9._-]", "-", plain).strip("-") if plain[:1] != "-" else ""
    return f"{socket.gethostname()[:40]}-{words[:40] or 'python'}-{os.getpid()}-{_TOKEN}" + f"-{number}" * (number > 1)


_TOKEN = secrets.token_hex(2)
_alive: weakref.WeakSet[_Private] = weakref.WeakSet()
_numbering = threading.Lock()


def _after_fork() -> None:
    for each in list(_alive):
        each.disown()
    _alive.clear()


@atexit.register  # before connect registers its own: so this runs when connections are closed
def _at_exit() -> None:
    for each in list(_alive):
        each.leave()


os.register_at_fork(after_in_child=_after_fork)

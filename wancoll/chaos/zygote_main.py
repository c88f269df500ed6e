"""The process that forks services, with the `wancoll` command loaded. See zygote.

`python -m wancoll.chaos.zygote_main PARENT` reads a JSON object a line: {"id", "arguments", "environment", "out",
"err"} starts `wancoll ARGUMENTS` with its output appended to the files. It answers {"id", "pid"}, and {"pid", "code"}
when one has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
from typing import Any

from wancoll.chaos.tether import die_with_parent

_LOADED = (  # so that the children need not
    "wancoll.cli.logs",
    "wancoll.cli.main",
    "wancoll.cli.master",
    "wancoll.cli.peer",
    "wancoll.cli.service",
    "wancoll.peer.daemon",
    "wancoll_master.server",
)


def _serve() -> None:
    """The zygote's loop: fork on demand, tell who has ended."""
    for module in _LOADED:
        importlib.import_module(module)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    orders = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _tell_ended()
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, orders = (orders + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    os.close(woken)
                    _become(order)
                print(json.dumps({"id": order["id"], "pid": pid}), flush=True)


def _tell_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)


def _become(order: dict[str, Any]) -> None:
    """In the child: be that command."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(os.getppid())
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, path in ((1, order["out"]), (2, order["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), target)
        os.closerange(3, 64)  # of the zygote
        os.environ.clear()
        os.environ.update(order["environment"])
        from wancoll.cli.main import run

        run(order["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    _serve()

"""`wancoll peer`: its options, checked, and the service around the daemon."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT
from wancoll.local import MASTER_PORT, split_address, split_addresses
from wancoll.net.listen import is_loopback_host
from wancoll.options import DEFAULT_MASTER, Flat, LogFormat, LogLevel, addresses, join_text
from wancoll.peer.config import PeerConfig, PeerLimits
from wancoll.resources import affordable
from wancoll.trust.token import parse

if TYPE_CHECKING:
    import trio

EXIT_ASKED_TO_LEAVE = 4  # so that whatever started it does not start it again
_ANYWHERE, _HERE = "*:0", "127.0.0.1:0"


def peer(
    *,
    config: Annotated[PeerConfig, Flat] = PeerConfig(),
    limits: Annotated[PeerLimits, Flat] = PeerLimits(),
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> int:
    """Run this machine's peer daemon: it moves and reduces the data of its clients.

    Prints "wancoll peer started socket=PATH data=HOST:PORT name=NAME and waits for its master at HOST:PORT" when
    clients can attach, and "wancoll peer ready socket=PATH data=HOST:PORT name=NAME" once a master has answered.
    SIGTERM or SIGINT drains and leaves, a second one ends it at once. Exit code 4: `wancoll leave` asked it to end.
    """
    from wancoll.cli.running import logs, service

    hide_token(config.join)
    logs.configure(log_level, log_format)
    for each in config.advertise:
        split_address(each, what="--advertise", default_port=0)
    _check_name("--name", config.name)
    _check_name("--site", config.site)
    config = replace(config, join=join_text(config.join))
    master = config.master or (parse(config.join).address if config.join else DEFAULT_MASTER)
    master = addresses(master, what="--master", default_port=MASTER_PORT)
    config = replace(
        config,
        master=master,
        listen=_listen(config, master),
        failpoint_token=os.environ.get("WANCOLL_FAILPOINTS", ""),
        limits=affordable(replace(DEFAULT, **asdict(limits))),
    )

    def _waits(started: Any) -> tuple[str, trio.Event | None]:
        return f"its master at {started.master}", None if config.ready_without_master else started.answered

    asked: list[bool] = []
    service.run("peer", partial(_serve, config, asked), _describe, _waits)
    return EXIT_ASKED_TO_LEAVE if any(asked) else 0


def hide_token(join: str) -> None:
    """Start this process again with the token in its environment, if it is an argument: others may read arguments."""
    arguments = [one for one in sys.orig_argv if join not in (one, one.removeprefix("--join="))]
    if join[:1] in ("", "@", "-") or len(arguments) == len(sys.orig_argv):
        return
    if "--join" in arguments:
        arguments.remove("--join")
    os.execve(sys.executable, arguments, {**os.environ, "WANCOLL_JOIN": join})


async def _serve(config: PeerConfig, asked: list[bool], *, stop: trio.Event, task_status: trio.TaskStatus[Any]) -> None:
    from wancoll.peer.daemon import serve

    asked.append(await serve(config, stop=stop, task_status=task_status))


def _describe(started: Any) -> str:
    return f"socket={started.socket} data={','.join(started.data)} name={started.name}"


def _listen(config: PeerConfig, master: str) -> str:
    """Where to listen for lanes.

    Raises:
        ConfigError: it cannot be read; or all would be in clear beyond this machine, and nobody has asked for that.
    """
    if config.listen:
        split_address(config.listen, what="--listen")
    if config.join:
        if config.insecure:
            raise ConfigError(
                "--insecure excludes --join", who="wancoll peer", expected="either", got="both",
                hint="each may come from the environment, too: WANCOLL_INSECURE, WANCOLL_JOIN",
            )  # fmt: skip
        return config.listen or _ANYWHERE
    near = all(is_loopback_host(host) for host, _ in split_addresses(master))
    listen = config.listen or (_ANYWHERE if config.insecure and (config.advertise or not near) else _HERE)
    said = {"--listen": (listen,), "--advertise": config.advertise}
    ways = [(f"{option} {each}", split_address(each, default_port=0)[0]) for option in said for each in said[option]]
    far = [way for way, host in ways if not is_loopback_host(host)]
    if config.insecure or (near and not far):
        return listen
    raise ConfigError(
        "goes beyond this machine, where all would be in clear and nobody asked who is there",
        who=f"wancoll peer {far[0]}" if near else f"wancoll peer --master {master}",
        expected="--join @FILE with the token that the master printed (or WANCOLL_JOIN, or connect(token=...))",
        got="none",
        hint="`wancoll token create` on the master's machine makes a token; --insecure (or WANCOLL_INSECURE=true), "
        "here and there, is for a network that is private already",
    )  # fmt: skip


def _check_name(option: str, name: str) -> None:
    if len(name) > DEFAULT.name_chars or not name.isprintable() or any(c.isspace() for c in name):
        raise ConfigError(
            f"{option} cannot be used",
            expected=f"at most {DEFAULT.name_chars} printable characters without spaces",
            got=repr(name[: DEFAULT.name_chars]),
        )

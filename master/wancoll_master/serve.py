"""A master from its settings: the journal, the listeners and, with etcd, the election around server.Server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import trio

from wancoll.errors import ConfigError
from wancoll.local import join_address
from wancoll.net.listen import open_listeners, trio_listeners
from wancoll_master.config import EtcdConfig, MasterConfig
from wancoll_master.server import Server
from wancoll_master.store.journal import Journal

log = structlog.get_logger("wancoll.master")

_FIRST_DAEMON_SECONDS = 60.0  # for the first daemon to come


async def serve(config: MasterConfig, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
    """Run a master until cancelled; then every peer is told Bye. Started value: the bound "host:port"s.

    Raises:
        ConfigError: the address, the journal or etcd's URLs cannot be used.
    """
    journal = Journal(config.journal)
    try:
        listeners = open_listeners(config.listen)
        try:
            server = Server(config, journal)
            async with trio.open_nursery() as nursery:
                bound = [join_address(*one.getsockname()[:2]) for one in listeners]
                nursery.start_soon(server.keep_time)
                nursery.start_soon(server.keep_awake)
                if config.etcd is None:
                    server.lead(journal)
                else:
                    nursery.start_soon(_elect(config, config.etcd, server, bound[0]))
                if config.end_when_unused:
                    nursery.start_soon(_end_when_unused, server, config.end_when_unused, nursery.cancel_scope)
                task_status.started(bound)
                await trio.serve_listeners(server.accept, trio_listeners(listeners))
        finally:
            for one in listeners:
                one.close()
    finally:
        journal.close()


async def _end_when_unused(server: Server, seconds: float, ending: trio.CancelScope) -> None:
    """Cancel *ending* once no daemon has been there for so long."""
    most, used_at = max(seconds, _FIRST_DAEMON_SECONDS), trio.current_time()
    while trio.current_time() - used_at < most:
        state = server.state
        if state is None or state.daemons:
            most, used_at = seconds, trio.current_time()
        elif state.next_mid > 1:
            most = seconds  # members came and went between two looks
        await trio.sleep(min(seconds / 4, 1.0))
    log.info("no daemon is there any more: the master ends")
    ending.cancel()


def _elect(
    config: MasterConfig, etcd: EtcdConfig, server: Server, bound: str
) -> Callable[[], Coroutine[Any, Any, None]]:
    """The task that makes the server lead and stand by.

    Raises:
        ConfigError: a setting, or a package that is not installed.
    """
    try:
        from wancoll_master.election import Election, advertised
    except ImportError as missing:
        raise ConfigError(
            "--etcd needs a package that is not installed",
            got=str(missing),
            hint="run, in the source folder: pip install '.[etcd]'",
        ) from missing
    return Election(etcd, server, advertised(config.advertise, bound, etcd.endpoints)).run

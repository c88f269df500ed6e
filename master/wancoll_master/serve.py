"""A master from its settings: the journal, the listeners and, with etcd, the election around server.Server."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import structlog
import trio

from wancoll.errors import ConfigError, without_package
from wancoll.local import join_address, split_address
from wancoll.metrics.core import families as f
from wancoll.metrics.guard import listeners_for
from wancoll.net.listen import open_listeners, serve_connections
from wancoll.trust.folder import ADMIN_KEY, MASTER_PUBLIC, held_folder
from wancoll_master.config import MasterConfig
from wancoll_master.core.views.page import Section
from wancoll_master.server import Server
from wancoll_master.store.journal import Journal

if TYPE_CHECKING:
    from wancoll.metrics.port import MetricsPort
    from wancoll_master.gate import Gate
    from wancoll_master.page import Page
    from wancoll_master.store.shared_trust import SharedTrust

log = structlog.get_logger("wancoll.master")

SEAL_KEY = "seal.key"  # in the state folder, unless --seal-key says where
_ANYWHERE = ("192.0.2.1", 9)  # an address that no network has
_FIRST_DAEMON_SECONDS = 60.0  # for the first daemon to come


async def serve(
    config: MasterConfig,
    tell: Callable[[str], None] = lambda _: None,
    *,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a master until cancelled; then every peer is told Bye. Started value: the bound "host:port"s.

    *tell* is told a token for daemons to join with, before the start, where there is a new one. Raises ConfigError: the
    address, the journal or etcd's URLs cannot be used.
    """
    if config.etcd is not None:
        try:
            from wancoll_master.store.etcd import check_access
        except ImportError as missing:
            raise without_package("--etcd", "etcd", missing) from missing
        check_access(config.etcd)
    journal = Journal(config.journal)
    holding = contextlib.ExitStack()
    try:
        _hold(config, holding)
        metrics = listeners_for("metrics", config.metrics, config.metrics_token, "wancoll.metrics.port")
        page = listeners_for("page", config.page, config.page_token, "wancoll_master.page")
        listeners = open_listeners(config.listen)
        try:
            servers: list[Server] = []  # none while etcd is waited for
            async with trio.open_nursery() as nursery, contextlib.AsyncExitStack() as stack:
                if metrics:
                    nursery.start_soon(_port(config, servers, metrics).serve)
                if page:
                    nursery.start_soon(_page(config, servers, page).serve)
                trust = await _shared_trust(config)
                gate = _gate(config, journal, trust)
                server = Server(config, journal, gate)
                servers.append(server)
                bound = [join_address(*one.getsockname()[:2]) for one in listeners]
                nursery.start_soon(server.keep_time)
                nursery.start_soon(server.keep_awake)
                if config.etcd is None:
                    server.lead(journal)
                else:
                    from wancoll_master.election import Election, whereabouts

                    address = reached_at(config.advertise, bound[0], whereabouts(config.etcd.endpoints))
                    nursery.start_soon(Election(config.etcd, server, address, gate, trust, tell).run)
                if config.end_when_unused:
                    nursery.start_soon(_end_when_unused, server, config.end_when_unused, nursery.cancel_scope)
                if gate is not None:
                    gate.address = reached_at(config.advertise, bound[0])
                    stack.callback(gate.close)
                    if trust is None and (token := gate.first_token()):
                        tell(token)
                    elif trust is None and config.secure:
                        log.info("a token of before is good: `wancoll token create` makes another one")
                task_status.started(bound)
                await serve_connections(listeners, server.accept, server.lets_in)
        finally:
            for one in (*listeners, *metrics, *page):
                one.close()
    finally:
        holding.close()
        journal.close()


def _hold(config: MasterConfig, holding: contextlib.ExitStack) -> None:
    """Hold the state folder for this master alone, if keys are in it, or will be. Raises ConfigError: it cannot."""
    admin = os.path.join(config.state, ADMIN_KEY)
    if not config.state or not (config.secure or os.path.exists(admin)):
        return
    try:
        holding.enter_context(held_folder(config.state, "master", f"at {config.listen}, process {os.getpid()}"))
        if not config.secure:  # of a master that was killed: commands would ask as its admin
            os.unlink(admin)
    except OSError as bad:
        raise ConfigError("cannot be used", who=f"--state {config.state}", got=str(bad), hint="choose another") from bad


async def _shared_trust(config: MasterConfig) -> SharedTrust | None:
    """The key and tokens of masters that share an etcd; waits for etcd."""
    if config.etcd is None or not config.secure:
        return None
    from wancoll_master.store import shared_trust
    from wancoll_master.store.etcd import Etcd

    if not config.state:
        raise ConfigError("--secure with --etcd needs --state", who="wancoll master", expected="a folder", got="none")
    path = config.seal_key or os.path.join(config.state, SEAL_KEY)
    async with Etcd(config.etcd, config.etcd.lease_ttl) as etcd:
        known = os.path.join(config.state, MASTER_PUBLIC)
        return await shared_trust.shared(etcd, config.etcd.prefix, path, known)


def _port(config: MasterConfig, servers: list[Server], metrics: list[socket.socket]) -> MetricsPort:
    """Where metrics are told. A master that stands by is ready: it says who leads. One that waits for etcd is not."""
    from wancoll.metrics.port import MetricsPort, Source

    def families() -> Iterator[f.Family | None]:
        for server in servers:
            yield from server.families()

    unready = lambda: "" if servers else "it waits for etcd"  # noqa: E731
    return MetricsPort(Source("master", "", families, unready), metrics, config.metrics_token)


def _page(config: MasterConfig, servers: list[Server], listeners: list[socket.socket]) -> Page:
    """The live page. A master that stands by, or waits for etcd, says so there."""
    from wancoll_master.page import Page

    def look() -> Iterator[Section | None]:
        for server in servers:
            yield from server.look()
        if not servers:
            yield "top", {"well": False, "line": "this master waits for etcd", "note": "", "groups": [], "more": 0}

    return Page(look, listeners, config.page_token)


def _gate(config: MasterConfig, journal: Journal, trust: SharedTrust | None) -> Gate | None:
    """The gate of this master; None: everybody is let in."""
    if not config.secure:
        return None
    from wancoll_master.gate import Gate  # loads `cryptography`

    return (
        Gate(config.state, journal) if trust is None else Gate(config.state, None, shared=trust.keys, admin=trust.admin)
    )


def reached_at(advertise: str, bound: str, towards: tuple[str, int] = _ANYWHERE) -> str:
    """What others shall dial: as the user said, else what is bound, else the interface to reach *towards* by."""
    host, port = split_address(bound)
    if advertise:
        return join_address(*split_address(advertise, what="--advertise", default_port=port))
    if host not in ("0.0.0.0", "::", ""):
        return bound
    try:
        found = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            return join_address(str(probe.getsockname()[0]), port)
    except OSError:
        log.warning("no route leads from here, so tokens name this host: give --advertise if others cannot look it up")
        return join_address(socket.gethostname(), port)


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

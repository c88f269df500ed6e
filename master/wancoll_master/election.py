"""Which of several masters leads: whoever holds the lease in etcd. The others stand by. A trio shell.

One transaction makes a leader: it creates the leader's key, which ends with the lease, where there is none, and raises
the term. core/leadership.py says until when the lease lets a master lead; store/etcd_store.py fences what it writes.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import time
from dataclasses import dataclass

import httpx
import structlog
import trio

from wancoll.local import join_address, split_address
from wancoll_master.config import EtcdConfig
from wancoll_master.core.leadership import RENEWALS_PER_TTL, Leadership
from wancoll_master.server import Server
from wancoll_master.store.etcd import Entry, Etcd, EtcdError, Lease, check_endpoints, created, modified, put
from wancoll_master.store.etcd_store import Deposed, EtcdStore, Keys, Numbers

log = structlog.get_logger("wancoll.master")

_LOOKS_PER_TTL = 10  # of a standby, whether there is a leader
_RETRY = 0.05  # seconds between tries to renew the lease
_REVOKE_TIMEOUT = 1.0  # seconds to give the lease back


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps, as a lease does


def advertised(advertise: str, bound: str, endpoints: str) -> str:
    """The address that others shall dial: what the user said, else what is bound, else the interface towards etcd."""
    host, port = split_address(bound)
    if advertise:
        return join_address(*split_address(advertise, what="--advertise", default_port=port))
    if host not in ("0.0.0.0", "::", "", "*"):
        return bound
    url = httpx.URL(check_endpoints(endpoints)[0])
    try:
        found = socket.getaddrinfo(url.host, url.port or 2379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            return join_address(str(probe.getsockname()[0]), port)
    except OSError:
        return join_address(socket.gethostname(), port)


@dataclass(frozen=True, slots=True)
class Won:
    """An election's outcome."""

    lease: Lease
    leadership: Leadership
    numbers: Numbers
    revision: int
    lost_facts: bool


class _Reign:
    """A server.Reign by a lease."""

    def __init__(self, leadership: Leadership) -> None:
        self.leadership = leadership
        self.over = trio.Event()
        self.reason, self.heard = "the master is stopping", 0

    def may_lead(self) -> bool:
        return self.leadership.holds(_clock())

    def end(self, reason: str, heard: int = 0) -> None:
        if not self.over.is_set():
            self.reason, self.heard = reason, heard
            self.leadership.over()
            self.over.set()


class Election:
    """See the module.

    Args:
        config: of etcd.
        server: leads when it is told to.
        address: "host:port" that standbys name to others while this master leads.
    """

    def __init__(self, config: EtcdConfig, server: Server, address: str) -> None:
        self._endpoints = check_endpoints(config.endpoints)
        self._keys = Keys(config.prefix)
        self._ttl = math.ceil(config.lease_ttl)
        self._server, self._address = server, address
        self._id = secrets.token_hex(8)
        self._heard = 0  # the highest term that a daemon has named
        self._known = ""  # leader that was logged last
        self._etcd_away = False

    async def run(self) -> None:
        """Task: stand by, lead, stand by, until cancelled."""
        async with Etcd(self._endpoints, self._ttl / RENEWALS_PER_TTL) as etcd:
            while True:
                won = None
                try:
                    if await self._look(etcd):
                        won = await self._campaign(etcd)
                    self._etcd_away = False
                except EtcdError as bad:
                    if not self._etcd_away:
                        log.warning("etcd cannot be asked who leads", reason=str(bad))
                    self._etcd_away = True
                    self._server.stand_by("", 0, wait=False)
                if won is not None:
                    await self._lead(etcd, won)
                else:
                    await trio.sleep(self._ttl / _LOOKS_PER_TTL)

    async def _look(self, etcd: Etcd) -> bool:
        """Whether nobody leads."""
        entry = await etcd.get(self._keys.leader)
        address, term = _who(entry)
        self._server.stand_by(address, term, wait=True)
        if address != self._known:
            log.info("stands by", leader=address or "nobody", term=term)
        self._known = address
        return entry is None

    async def _campaign(self, etcd: Etcd) -> Won | None:
        keys = self._keys
        sent_at = _clock()
        lease = await etcd.grant(self._ttl)
        try:
            entry = await etcd.get(keys.facts)
            numbers = Numbers.read(entry)
            lost = self._heard > numbers.term
            numbers.term = max(numbers.term, self._heard) + 1
            numbers.write += 1
            me = json.dumps({"address": self._address, "term": numbers.term, "id": self._id})
            answer = await etcd.txn(
                [created(keys.leader, 0), modified(keys.facts, entry.modified if entry is not None else 0)],
                [put(keys.leader, me, lease.id), put(keys.facts, numbers.text)],
                [],
            )
            won = answer.succeeded
        except BaseException:
            await self._give_back(etcd, lease)  # the transaction may have been carried out, or may be yet
            raise
        if not won:
            await self._give_back(etcd, lease)
            return None
        return Won(lease, Leadership(lease.ttl, sent_at), numbers, answer.revision, lost)

    async def _give_back(self, etcd: Etcd, lease: Lease) -> None:
        with trio.move_on_after(_REVOKE_TIMEOUT, shield=True):
            try:
                await etcd.revoke(lease.id)
            except EtcdError as bad:
                log.info("the lease was not given back", reason=str(bad))

    # ---- leading -------------------------------------------------------------------------------------

    async def _lead(self, etcd: Etcd, won: Won) -> None:
        """Lead for as long as that is allowed."""
        reign = _Reign(won.leadership)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._renew, etcd, won.lease, reign)
                nursery.start_soon(self._watch, reign)
                nursery.start_soon(self._write, etcd, won, reign)
                await reign.over.wait()
                nursery.cancel_scope.cancel()
        finally:
            won.leadership.over()
            self._server.step_down(reign.reason)
            self._heard = max(self._heard, reign.heard)
            log.warning("leads no more", reason=reign.reason)
            self._known = ""
            await self._give_back(etcd, won.lease)

    async def _write(self, etcd: Etcd, won: Won, reign: _Reign) -> None:
        """Task: have the server lead, and write for it."""
        store = EtcdStore(etcd, self._keys, won.numbers, won.revision, self._ttl)
        try:
            await store.load()
            log.info("leads", term=won.numbers.term, address=self._address, groups=len(store.facts.used))
            self._server.lead(store, reign, lost_facts=won.lost_facts)
            await store.write_forever(self._server.release)
        except (Deposed, EtcdError) as bad:
            self._server.step_down(str(bad))
            reign.end(str(bad))

    async def _renew(self, etcd: Etcd, lease: Lease, reign: _Reign) -> None:
        """Task: keep the lease."""
        leadership = reign.leadership
        while True:
            await trio.sleep(max(0.0, leadership.renew_at - _clock()))
            sent_at = _clock()
            try:
                ttl = await etcd.keep_alive(lease.id)
            except EtcdError as bad:
                left = leadership.until - _clock()
                log.warning("the lease was not renewed; it is tried again", left=round(left, 2), reason=str(bad))
                await trio.sleep(_RETRY)
                continue
            if ttl <= 0:
                reign.end("its lease ran out")
                return
            leadership.renewed(ttl, sent_at)

    async def _watch(self, reign: _Reign) -> None:
        """Task: step down in time, also where nothing happens."""
        while reign.may_lead():  # noqa: ASYNC110 - until a time that moves
            await trio.sleep(max(0.0, reign.leadership.until - _clock()))
        reign.end("its lease was not renewed in time")


def _who(entry: Entry | None) -> tuple[str, int]:
    """(address, term) of the leader; ("", 0): there is none, or it cannot be read."""
    try:
        found = json.loads(entry.value) if entry is not None else {}
        return str(found.get("address", ""))[:300], max(0, int(found.get("term", 0)))
    except (ValueError, TypeError, AttributeError):
        return "", 0

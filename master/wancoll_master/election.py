"""Which of several masters leads: whoever holds the lease in etcd. The others stand by. A trio shell.

One transaction makes a leader: it creates the leader's key, which ends with the lease, where there is none, and raises
the term. core/leadership.py says until when the lease lets a master lead; store/etcd_store.py fences what it writes.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import structlog
import trio

from wancoll.errors import ConfigError
from wancoll.net import clock
from wancoll.wire import messages as m
from wancoll_master.config import EtcdConfig
from wancoll_master.core.leadership import RENEWALS_PER_TTL, Leadership
from wancoll_master.core.ready import jumped
from wancoll_master.server import Server
from wancoll_master.store.etcd import Etcd, EtcdError, Lease, check_endpoints, created, modified, put
from wancoll_master.store.etcd_store import (
    Deposed,
    EtcdStore,
    Keys,
    Leader,
    Numbers,
    Unreadable,
    read,
    text,
)
from wancoll_master.store.shared_trust import Rows, SharedTrust

if TYPE_CHECKING:
    from wancoll_master.gate import Gate

log = structlog.get_logger("wancoll.master")

_LOOKS_PER_TTL = 10  # of a standby, whether there is a leader
_RETRY = 0.05  # seconds between tries to renew the lease
_REVOKE_TIMEOUT = 5.0  # seconds to give the lease back: a machine may stand still while its master stops


def whereabouts(endpoints: str) -> tuple[str, int]:
    """Host and port of the first of etcd's URLs."""
    url = httpx.URL(check_endpoints(endpoints)[0])
    return url.host, url.port or 2379


class Won:
    """An election that was won, and what follows: a server.LeadershipTerm by a lease."""

    def __init__(
        self, lease: Lease, leadership: Leadership, numbers: Numbers, revision: int, *, lost_facts: bool
    ) -> None:
        self.lease, self.leadership = lease, leadership
        self.numbers, self.revision, self.lost_facts = numbers, revision, lost_facts
        self.over = trio.Event()
        self.reason, self.heard = "the master is stopping", 0
        self.began = False

    def may_lead(self) -> bool:
        """See LeadershipTerm."""
        return self.leadership.holds(clock.awake_or_asleep())

    def end(self, reason: str, heard: int = 0) -> None:
        """See LeadershipTerm."""
        if not self.over.is_set():
            self.reason, self.heard = reason, heard
            self.leadership.over()
            self.over.set()


class Election:
    """Decides which of several masters leads. Standbys name *address* to others while this master leads.

    *trust* is what the masters share; *tell* is told a token for daemons to join with where there is none that is good.
    """

    def __init__(
        self,
        config: EtcdConfig,
        server: Server,
        address: str,
        gate: Gate | None = None,
        trust: SharedTrust | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._gate, self._trust, self._tell = gate, trust, tell
        self._config = config
        self._keys = Keys(config.prefix)
        self._ttl = math.ceil(config.lease_ttl)
        self._server, self._address = server, address
        self._id = secrets.token_hex(8)
        self._rows: Rows | None = None  # while no other master has led since this one did
        self._heard = 0  # the highest term that a daemon has named, or that was seen in etcd
        self._lease, self._seen_at = "", -math.inf  # of the leader that was seen in etcd last
        self._known = ""  # leader that was logged last
        self._trouble = self._untrusted = ""  # that was logged last
        self._why = ""  # nobody leads

    async def run(self) -> None:
        """Task: stand by, lead, stand by, until cancelled."""
        async with Etcd(self._config, self._ttl / RENEWALS_PER_TTL) as etcd:
            while True:
                won = None
                try:
                    if await self._look(etcd):
                        won = await self._campaign(etcd)
                    self._trouble = self._why = ""
                except EtcdError as bad:
                    unreadable = isinstance(bad, Unreadable)
                    trouble = str(bad) if unreadable else "away"
                    if trouble != self._trouble:
                        what = "nobody can lead by what etcd has" if unreadable else "etcd cannot be asked who leads"
                        log.warning(what, reason=str(bad))
                    self._trouble, self._why = trouble, str(bad)[:1000]
                    self._server.stand_by(m.StandsBy("", 0, "", self._why), wait=False)
                if won is not None:
                    if not await self._lead(etcd, won):
                        await trio.sleep(self._ttl)  # until then it may be mended, or another's version reads it
                else:
                    await trio.sleep(self._ttl / _LOOKS_PER_TTL)

    async def _look(self, etcd: Etcd) -> bool:
        """Whether nobody leads."""
        entry = await etcd.get(self._keys.leader)
        address, term = "", 0
        if entry is not None:
            leader = read(entry, Leader)
            address, term = leader.address, leader.term
            if leader.id != self._id:
                self._rows = None  # it changes them
            self._lease, self._seen_at, self._heard = entry.lease, clock.awake_or_asleep(), max(self._heard, term)
        why = self._why if not address else ""
        self._server.stand_by(m.StandsBy(address, term, self._keys.elected_by(etcd), why), wait=True)
        if address != self._known:
            log.info("stands by", leader=address or "nobody", term=term)
        self._known = address
        await self._follow(etcd)
        return entry is None and not (self._lease and await etcd.lives(self._lease))  # somebody has deleted its key

    async def _follow(self, etcd: Etcd) -> None:
        """The keys that the leader has now: daemons ask a standby, too, who leads."""
        trouble = ""
        try:
            newer = await self._trust.newer(etcd) if self._trust is not None else None
            if newer is not None and self._gate is not None:
                self._gate.follow(newer.keys, newer.admin)
                self._trust = newer
        except EtcdError as bad:
            trouble = str(bad)
            if trouble != self._untrusted:
                log.warning("the masters' keys are as they were known before", reason=trouble)
        self._untrusted = trouble

    async def _campaign(self, etcd: Etcd) -> Won | None:
        keys = self._keys
        entry = await etcd.get(keys.facts)
        numbers = read(entry, Numbers) if entry is not None else Numbers(term=0, epoch=0, mid=1, write=0)
        lost = self._heard > numbers.term
        if lost and clock.awake_or_asleep() < self._seen_at + self._ttl:
            return None  # the lease may be lost, too, and its leader does not know yet
        if lost:
            numbers.term, numbers.epoch, numbers.mid = jumped(self._heard, numbers.epoch, numbers.mid)
        numbers.term = max(numbers.term, self._heard) + 1
        numbers.write += 1
        me = text(Leader(self._address, numbers.term, self._id))
        sent_at = clock.awake_or_asleep()
        lease = await etcd.grant(self._ttl)
        try:
            answer = await etcd.txn(
                [created(keys.leader, 0), modified(keys.facts, entry.modified if entry is not None else 0)],
                [put(keys.leader, me, lease.id), put(keys.facts, text(numbers))],
                [],
            )
            won = answer.succeeded
        except BaseException:
            await give_back(etcd, lease)  # the transaction may have been carried out, or may be yet
            raise
        if not won:
            await give_back(etcd, lease)
            return None
        return Won(lease, Leadership(lease.ttl, sent_at), numbers, answer.revision, lost_facts=lost)

    # ---- leading -------------------------------------------------------------------------------------

    async def _lead(self, etcd: Etcd, won: Won) -> bool:
        """Lead for as long as that is allowed; False: it never began, for what is in etcd."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._renew, etcd, won)
                nursery.start_soon(self._watch, won)
                nursery.start_soon(self._write, etcd, won)
                await won.over.wait()
                nursery.cancel_scope.cancel()
        finally:
            won.leadership.over()
            self._server.step_down(won.reason)
            self._heard = max(self._heard, won.heard, won.numbers.term)
            log.warning("leads no more", reason=won.reason)
            self._known = ""
            await give_back(etcd, won.lease)
        return won.began

    async def _write(self, etcd: Etcd, won: Won) -> None:
        """Task: have the server lead, and write for it."""
        store = EtcdStore(etcd, self._keys, won.numbers, won.revision, self._ttl)
        try:
            await store.load()
            if self._gate is not None and self._trust is not None:
                self._rows = await self._trust.rows(store, etcd, self._rows)
                self._gate.lead(self._rows)
            log.info("leads", term=won.numbers.term, address=self._address, groups=len(store.facts.used))
            self._server.lead(store, won, lost_facts=won.lost_facts)
            won.began = True
            first = [self._gate.first_token()] if self._gate is not None and self._trust is not None else []

            def written() -> None:
                self._server.release()
                for token in filter(None, first):
                    self._tell(token)
                first.clear()

            await store.write_forever(written)
        except (Deposed, EtcdError, ConfigError) as bad:
            self._why = str(bad)[:1000]
            self._server.step_down(str(bad))
            won.end(str(bad))

    async def _renew(self, etcd: Etcd, won: Won) -> None:
        """Task: keep the lease, as long as the leader's key is this leadership's."""
        leadership = won.leadership
        while True:
            await trio.sleep(max(0.0, leadership.renew_at - clock.awake_or_asleep()))
            sent_at = clock.awake_or_asleep()
            try:
                ttl = await etcd.keep_alive(won.lease.id)
                key = await etcd.get(self._keys.leader)
            except EtcdError as bad:
                left = leadership.until - clock.awake_or_asleep()
                log.warning("the lease was not renewed; it is tried again", left=round(left, 2), reason=str(bad))
                await trio.sleep(_RETRY)
                continue
            if ttl <= 0:
                won.end("its lease ran out")
                return
            if key is None or key.created != won.revision:
                won.end(f"somebody else has changed {self._keys.leader} in etcd")
                return
            leadership.renewed(ttl, sent_at)

    async def _watch(self, won: Won) -> None:
        """Task: step down in time, also where nothing happens."""
        while won.may_lead():  # noqa: ASYNC110 - until a time that moves
            await trio.sleep(max(0.0, won.leadership.until - clock.awake_or_asleep()))
        won.end("its lease was not renewed in time")


async def give_back(etcd: Etcd, lease: Lease) -> None:
    """Have *lease* end now, so that another master leads at once; also while this one is cancelled."""
    with trio.move_on_after(_REVOKE_TIMEOUT, shield=True):
        try:
            await etcd.revoke(lease.id)
        except EtcdError as bad:
            log.info("the lease was not given back", reason=str(bad))

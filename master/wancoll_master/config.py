"""Settings of a master: the options of `wancoll master`, with their defaults and their help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from wancoll.limits import DEFAULT, Limits
from wancoll.options import (
    DEFAULT_MASTER,
    Flat,
    Metrics,
    MetricsToken,
    Page,
    PageToken,
    Seconds,
    SecondsOrNone,
    Unseen,
    between,
)


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """How several masters choose the one that leads.

    Attributes:
        endpoints: URLs of etcd's members, http://HOST:PORT[,http://HOST:PORT], or https: with it several masters may
            run, one leads, and the others stand by. Empty: this is the only master.
        prefix: Prefix of all keys in etcd. Masters with the same prefix stand by for each other.
        lease_ttl: Seconds after which a leader that etcd does not hear of is replaced, rounded up. etcd's own least is
            1.5 of its --election-timeout, 2 by default.
        ca: PEM file of the authority that etcd's certificates are of. Empty: the system's authorities.
        cert: PEM file of this master's certificate for etcd.
        key: PEM file of its key, where --etcd-cert does not hold it.
        user: User of etcd, who may read and write under --etcd-prefix. The password is WANCOLL_ETCD_PASSWORD in the
            environment.
    """

    endpoints: Annotated[str, Parameter(name="--etcd")] = ""
    prefix: Annotated[str, Parameter(name="--etcd-prefix")] = "wancoll/"
    lease_ttl: Annotated[Seconds, Parameter(name="--lease-ttl")] = 2.0
    ca: Annotated[str, Parameter(name="--etcd-ca")] = ""
    cert: Annotated[str, Parameter(name="--etcd-cert")] = ""
    key: Annotated[str, Parameter(name="--etcd-key")] = ""
    user: Annotated[str, Parameter(name="--etcd-user")] = ""
    password: Annotated[str, Unseen] = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig:
    """The settings of a master.

    Attributes:
        listen: HOST:PORT for peers and `wancoll status`. Port 0 lets the system choose. '*' as host: all interfaces. On
            loopback all is in clear; beyond it --secure is the default.
        journal: Path of the sqlite file with the epoch counter (with --etcd it is there) and the event log. Empty:
            wancoll/master-PORT.sqlite in $XDG_STATE_HOME or ~/.local/state; with --etcd, or port 0, none. 'none': kept
            in memory, and what had been decided is forgotten with the master.
        first: There was no master before this one, so groups form at once; where it finds a journal there was, and
            this says nothing. A master without one may have lost it, so it waits for --rejoin-grace for members of
            before to report. For a start by hand; never in a unit or a pod, which may start again without its files.
        advertise: HOST or HOST:PORT where peers reach this master, for the token that it prints, and for standbys to
            name, where it differs from --listen. Empty: what --listen says; for all interfaces the address of one.
        announce: Networks, such as 10.0.0.0/8, of which daemons may announce over TLS any address for their
            lanes, beside the one that they connect from; any: whatever they say. Members dial what is announced.
        secure: TLS for all, and only for keys that this master has admitted: it prints a token with which daemons are.
            Daemons then speak TLS among each other, too. The default where --listen is beyond loopback, unless
            --insecure is given.
        insecure: In clear also beyond loopback: whoever reaches the port can read and change everything. For a network
            that is private already. Daemons need it, too.
        relay: Rate, such as 1Gbit/s, up to which this master carries what members say to each other that cannot
            reach each other: a relay at its own port. It goes over this machine's line twice, in and out. Empty: none.
        state: Folder of this master's key, for this user alone. Empty: wancoll/master-PORT in $XDG_STATE_HOME or
            ~/.local/state; with --end-when-unused at port 0 one that is removed at the end.
        seal_key: With --etcd, unless in clear: the key file, the same for all masters, that seals the key and the
            tokens which they share in etcd. Made by the first master where there is none: copy it to the others. Empty:
            seal.key in --state.
        end_when_unused: Seconds without any daemon after which this master ends by itself; before the first one it
            waits for a minute. 0: never.
        etcd: None: this is the only master.
        failpoint_token: from WANCOLL_FAILPOINTS; empty: fault injection is off.
        limits: bounds and timeouts.
    """

    listen: str = DEFAULT_MASTER
    journal: str = ""
    first: Annotated[bool, Parameter(negative=())] = False
    etcd: Annotated[EtcdConfig | None, Flat] = None
    advertise: str = ""
    announce: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    secure: Annotated[bool, Parameter(negative=())] = False
    insecure: Annotated[bool, Parameter(negative=())] = False
    relay: str = ""
    state: str = ""
    seal_key: str = ""
    end_when_unused: SecondsOrNone = 0.0
    metrics: Metrics = ""
    metrics_token: MetricsToken = ""
    page: Page = ""
    page_token: PageToken = ""
    failpoint_token: Annotated[str, Unseen] = ""
    limits: Annotated[Limits, Unseen] = DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterLimits:
    """The limits that users tune.

    Attributes:
        heartbeat_timeout: Seconds of silence after which a peer is evicted.
        probe_timeout: Seconds for a joiner's data addresses to answer before it is refused.
        slow_after: Seconds after which an operation is shown with what it waits for.
        call_timeout: Seconds after which a member is evicted that has not called what another member has called, where
            the group has not set connect(call_timeout=...). 0: never, since training may compute for long.
        stall_timeout: Seconds that an operation which all members run may move nothing, with no link to blame, before
            their links are made anew; the third time it is given up.
        rejoin_grace: Seconds that a restarted master waits for members it hears of to report; keep it below the peers'
            --master-grace.
        restart_with_min_world: A group that ran before, by the journal, and has lost all members starts anew with
            min_world, not start_world: for machines that may not all come back. So does a new run under the same group
            name.
        voters: Members of a group that may collect votes themselves: each tells all others what it has finished, for
            what proves that all took part, and no word goes to the master. In larger groups, in one whose members
            cannot all reach each other, and with 0, the master collects the votes: a call takes a round trip to it
            more, and waits while it is away.
        handshake_timeout: Seconds for a new connection to introduce itself before it is closed.
    """

    heartbeat_timeout: Seconds = DEFAULT.heartbeat_timeout
    probe_timeout: Seconds = DEFAULT.probe_timeout
    slow_after: Seconds = DEFAULT.slow_after
    call_timeout: SecondsOrNone = DEFAULT.call_timeout
    stall_timeout: Seconds = DEFAULT.stall_timeout
    rejoin_grace: Seconds = DEFAULT.rejoin_grace
    restart_with_min_world: Annotated[bool, Parameter(negative=())] = False
    voters: Annotated[int, Parameter(validator=between(0, DEFAULT.voters))] = DEFAULT.voters
    handshake_timeout: Seconds = DEFAULT.handshake_timeout

"""The configuration of a world, drawn from its seed: sizes, limits, delays, which faults, what is called."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from wancoll.limits import Limits

FAULTS = (
    "kill_daemon", "lose_host", "restart_twice", "twin", "pause_daemon", "cut_pair", "cut_one_way", "cut_master",
    "isolate", "clog", "break_lane", "break_control", "kill_client", "leave", "join", "slow_client", "kill_master",
    "cut_short_master", "lose_journal", "pause_master", "takeover", "flip", "exchange", "differ", "only_one_left",
    "late_dials", "filter_sends", "filter_collectives", "break_unheard", "reset_control", "cut_off_master", "lose_site",
    "full_disk", "store_away", "refuse_write", "reset_link",
)  # fmt: skip
MASTER_ONLY = ("kill_master", "cut_short_master", "pause_master", "takeover", "reset_control", "cut_off_master")
BESIDE = ("reset_all",)  # in worlds of its own: nobody may be evicted for it
HARMLESS = ("exchange", "join", "slow_client")
# What is told to few is hard to make good: a master dies while it says what these bring about.
NEWS = ("join", "differ", "cut_master", "flip", "kill_client", "kill_daemon", "lose_site", "only_one_left", "takeover")


@dataclass(frozen=True, slots=True)
class Odd:
    """See the module. Times are virtual seconds."""

    daemons: int
    clients: int
    start_world: int
    min_world: int
    limits: Limits
    delays: tuple[float, float]
    spikes: float
    shuffled: bool
    engine_delay: float
    think: float
    pipeline: int
    update_every: int
    raises: float
    lanes: int
    sites: int
    natted: int  # hosts that are behind a NAT; the master is a relay then
    measures: bool
    wire: bool
    patient: bool  # nobody may be evicted for the faults that there are
    elected: bool  # masters lead by a lease and stand by for each other; else one follows the other
    write_delay: float  # at most, each way, of a store that fences
    exact_leases: bool  # a master whose lease has run out does nothing any more
    faults: tuple[str, ...]
    fault_count: int
    chaos_seconds: float


def draw(random: Random, *, calm: tuple[str, ...] | None = None) -> Odd:
    """A configuration. *calm*: these faults only."""
    delay = random.choice(((0.0, 0.0), (0.001, 0.001), (0.0, 0.01), (0.001, 0.03), (0.02, 0.06)))
    kinds = random.random()
    if calm is not None:
        faults = calm
    elif kinds < 0.1:
        faults = (*MASTER_ONLY, *HARMLESS)  # nobody may be evicted for them
    elif kinds < 0.25:
        faults = ("cut_short_master", "cut_short_master", *random.sample(NEWS, 2))
    else:
        faults = tuple(random.sample(FAULTS, random.randint(1, 6)))
    patient = set(faults) <= {*MASTER_ONLY, *HARMLESS, *BESIDE}
    elected, exact = random.random() < 0.5, patient or random.random() < 0.5
    clients = random.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7))
    daemons = max(1, min(clients, random.choice((clients, clients, clients, clients - 1))))
    start = random.randint(1, clients)
    least = random.randint(1, start)
    interval = random.choice((0.2, 0.5))
    timeout = interval * (6 if patient else random.choice((3, 6)))
    link_timeout = random.choice((0.5, 1.0, 3.0))
    limits = Limits(
        heartbeat_interval=interval,
        heartbeat_timeout=timeout,
        master_grace=15.0 if patient else random.choice((2.0, 4.0, 10.0)),
        rejoin_grace=timeout + 4.0 if patient else random.choice((0.5, 1.0, 3.0)),
        connect_timeout=random.choice((0.5, 1.0)),
        handshake_timeout=1.0,
        probe_timeout=random.choice((0.5, 1.0)),
        lane_timeout=random.choice((1.0, 2.0)),
        link_timeout=link_timeout,
        link_settle=random.choice((0.0, 0.1, 0.1)),
        mismatch_wait=random.choice((0.2, 1.0)),
        ops_in_flight=random.choice((1, 3, 16, 16)),
        digest_retries=random.choice((0, 1, 1, 2)),
    )
    return Odd(
        daemons=daemons,
        clients=clients,
        start_world=start,
        min_world=least,
        limits=limits,
        delays=delay,
        spikes=0.0 if patient else random.choice((0.0, 0.0, 0.02)),
        shuffled=random.random() < 0.5,
        engine_delay=random.choice((0.0, 0.0, 0.002, 0.02)),
        think=random.choice((0.05, 0.2, 0.4, 0.6)),
        pipeline=random.choice((1, 1, 2, 4)),
        update_every=random.choice((3, 4, 6)),
        raises=random.choice((0.0, 0.2, 0.5)),
        lanes=random.choice((1, 4)),
        sites=random.choice((0, 0, 2)),
        natted=0 if patient else random.choice((0,) * 6 + (1, 2, 3)),
        measures=random.random() < 0.2,
        wire=random.random() < 0.1,
        patient=patient,
        elected=elected,
        write_delay=random.choice((0.0, 0.002, 0.02, 0.2)) if elected else 0.0,
        exact_leases=exact,
        faults=faults,
        fault_count=random.choice((1, 2) if patient else (1, 2, 4, 8)),
        chaos_seconds=random.choice((0.5, 1.5, 3.0)),
    )

"""What the master decides for an epoch beside who is in it: order, lanes, pace, algorithms. Pure.

What connections are made with (lanes, pacing, congestion control) changes only where a new epoch costs nothing: when
the group forms, when a joiner is admitted, and at an update_membership. After a loss the survivors keep it, and their
order, unless another one is much better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import floor, inf, log, log10
from typing import NamedTuple, Protocol

from wancoll.limits import KIB, THREADS
from wancoll.schedule.cost import LinkCost, Sites, choices, chosen, predicted, usable
from wancoll.units import format_duration, format_rate
from wancoll.wire import messages as m
from wancoll.wire.messages.fields import SITE_LENGTH
from wancoll_master.plan.measures import Measures
from wancoll_master.plan.shares import busiest, share_out
from wancoll_master.plan.topology import (
    EXACT_BEST,
    LOCAL_STRIPE,
    MATERIAL,
    SEARCHED,
    SHARED_STRIPE,
    STRIPE,
    Ring,
    better_ring,
    machine,
    pair,
    ring_order,
)

FAR = 0.005  # seconds of round trip from which a path counts as long
MAX_AVOID = 4096  # pairs that a Plan can carry
FAR_STRIPE = 8 * KIB  # there: a first flight is about 14 KiB on each lane, so small tensors share several lanes
FAR_SHARING = 8  # lanes of each at least, over a long path: a thread is fast enough there, and lanes slow at times
LANE_WINDOW = 2 << 20  # bytes under way on one lane: half of what Linux lets a send buffer grow to
LANE_LOOKS = 3  # before other lanes are tried: first operations are slow for other reasons
LANE_GAIN = 1.05  # times more that twice the lanes have to carry
LOOK_SECONDS = 5.0  # before the first look for a better plan; twice as long after each that was found
LOOK_DOUBLINGS = 7
FEW_LOST = 15 / 16  # of the members are left: the algorithms of before are as good
REPLAN = 1.6  # times better another order has to be once operations run: links made anew are cold
AFTER_LOSS = 2.0  # times better another order has to be for survivors of a loss
FILLED = 0.7  # share of what a probe found that lanes have to carry, for more of them to be needless
PACE_LOSS = 0.01  # share of packets lost on an edge of the ring, from which a pace may be too high
PACING_STAYS = 1.1  # times off, in both directions, before a pace is changed

OVERHEAD = 50e-6  # seconds of a message beside the path's latency
HANDLING = 15e-6  # seconds of a daemon's work for each message
UPLINK = 125e6  # bytes per second, where nothing was measured: 1 Gbit/s
NEAR = LinkCost(100e-6 + OVERHEAD, 1 / 1.25e9, HANDLING)  # within a site, where nothing was measured: 10 Gbit/s
LOCAL_LATENCY, LOCAL_BANDWIDTH = 20e-6, 4e9  # within a machine
LATENCY_GRAIN = 0.5e-3  # seconds: finer differences do not make an order better
BANDWIDTH_GRAIN = 1.5  # times: probes of several daemons at a time are no more exact

# Within one machine messages cost processor time, whoever sends them. The ring is as good as any there, from 1 KiB to
# 64 MiB, but for a tree at 8 ranks up to 128 KiB, which gains a tenth or two: not enough to open more links for.
LOCAL_CHOICES: dict[str, list[tuple[int, str]]] = {}
_JUDGED = [1 << i for i in range(10, 29, 2)]  # bytes of all-reduces by which two lists of choices are compared


# ---- what a plan is made for, and from --------------------------------------------------------------


class Daemon(Protocol):
    """A daemon, as planning sees it."""

    name: str
    addresses: list[str]
    hints: list[str]
    site: str
    lanes: int
    max_lanes: int
    congestion_controls: frozenset[str]
    cores: int


class Member(Protocol):
    """A member, as planning sees it."""

    mid: int

    @property
    def daemon(self) -> Daemon:
        """Where its lanes end."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A group's plan, and what it was made from."""

    plan: m.Plan
    cost: LinkCost | None = None  # None: nothing was known
    tried: dict[int, float] = field(default_factory=dict)  # lanes -> bytes per second of the slowest uplink
    settled: bool = False  # more lanes gain nothing
    looks: int = 0  # for a better plan, since these lanes are in use
    seen_version: int = -1  # of the measures, when a better plan was last looked for
    seen_at: float = -inf
    replans: int = 0  # better plans found while operations ran
    shape: tuple[int, int] = (0, 0)  # members and named sites that cost and choices were found for


@dataclass(frozen=True, slots=True)
class Proposal:
    """An order of members and a plan for it; *changes* are material ones, in words."""

    order: list[int]  # mids
    planned: Planned
    changes: list[str]


@dataclass(frozen=True, slots=True)
class Request:
    """For the order and the plan of an epoch that begins now."""

    measures: Measures  # what is known of paths
    members: Sequence[Member]  # in their present order
    before: Planned | None  # the plan that they have
    bad_pairs: Collection[tuple[int, int]]  # of mids that cannot reach each other
    now: float  # seconds, on the clock of *before*
    free: bool  # new connections and links cost nothing now


# What propose() does: quadratic work at least. The master's step is handed it, since its own work is to be bounded.
Planner = Callable[[Request], Proposal]


def due(planned: Planned | None, measures: Measures, now: float) -> bool:
    """Whether a better plan may be found: more is known, and it is not long ago that one was looked for."""
    if planned is None or planned.seen_version == measures.version:
        return False
    pause: float = LOOK_SECONDS * 2 ** min(planned.replans, LOOK_DOUBLINGS)
    return now - planned.seen_at >= pause


def possible(plan: m.Plan, world: int) -> bool:
    """Whether a master can have made *plan*, which a daemon tells, for *world* members."""
    return usable(plan.choices, plan.shares, world) and plan.lane_groups <= plan.lanes


def propose(request: Request) -> Proposal:
    """Answer a request, by what is known."""
    measures, before, free = request.measures, request.before, request.free
    bad = sorted(request.bad_pairs)
    material = AFTER_LOSS if not free else REPLAN if before is not None else MATERIAL
    members, changes = _order(measures, request.members, bad, material, free=free)
    local = is_local(members)
    daemons = list(dict.fromkeys(member.daemon for member in members))
    shape = len(members), len({member.daemon.site for member in members})
    same = before if before is not None and not free and _much_as_before(before.shape, shape) else None
    paths = [] if local or (same is not None and not same.plan.shares) else _paths(measures, daemons)
    speeds = _speeds(measures, paths, members) if paths else []
    shares = share_out(speeds)
    if same is not None:
        cost, choices, shape = same.cost, same.plan.choices, same.shape
    else:
        cost = None if local else _cost(measures, paths, members, _owning(shares, speeds))
        choices = LOCAL_CHOICES if local else _choices(paths, members, cost)
    kept = before if not free else None  # after a loss links stay as they are
    wire = kept or _wire(measures, paths, members, before, local=local)
    far = cost is not None and cost.alpha > FAR / 2
    lanes = max(1, min(wire.plan.lanes, *(_most_lanes(daemon) for daemon in daemons)))
    groups = min(wire.plan.lane_groups, lanes)
    stripe = FAR_STRIPE if far else STRIPE
    if local:
        lanes = lanes if kept else groups  # no lane is slower than others there
        stripe = LOCAL_STRIPE if groups == 1 else SHARED_STRIPE
    plan = m.Plan(
        lanes=lanes,
        stripe=stripe,
        turns=not local,
        choices=choices,
        avoid=_avoid(members, bad),
        pacing=wire.plan.pacing,
        congestion=wire.plan.congestion,
        spares=far,
        lane_groups=groups,
        shares=shares,
    )
    if before is not None:
        old = dict(zip((member.mid for member in request.members), before.plan.shares, strict=False))
        still = len(old) == len(members) and any(old.values())  # those who owned the tensor may be gone
        owned = [old[member.mid] for member in members] if still else []
        old_cost = replace(cost, owning=_owning(owned, speeds)) if cost is not None else None
        changes += _differences(before.plan, plan, len(members), old_cost, cost)
    planned = replace(
        wire,
        plan=plan,
        cost=cost,
        seen_version=measures.version,
        seen_at=request.now,
        replans=before.replans if before is not None else 0,
        shape=shape,
    )
    return Proposal([member.mid for member in members], planned, changes)


def _threads(members: Sequence[Member]) -> int:
    """Threads of a daemon that one operation keeps busy: the members of a machine share its cores."""
    places = [_place(member.daemon) for member in members]
    beside = Counter(places)
    shares = [member.daemon.cores // beside[place] for member, place in zip(members, places, strict=True)]
    return max(1, min(THREADS, *shares))


def _much_as_before(before: tuple[int, int], shape: tuple[int, int]) -> bool:
    """Whether few of many were lost, and no site: what was found for the others holds, and need not be told again."""
    return before[1] == shape[1] and before[0] * FEW_LOST <= shape[0] <= before[0]


def _avoid(members: Sequence[Member], bad: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs that cannot reach each other; not ring neighbours, which must try, since no order keeps them apart."""
    neighbours = {pair(one.mid, other.mid) for one, other in [*pairwise(members), (members[-1], members[0])]}
    return [ends for ends in bad if ends not in neighbours][:MAX_AVOID]


def _differences(old: m.Plan, new: m.Plan, world: int, old_cost: LinkCost | None, cost: LinkCost | None) -> list[str]:
    """What is materially better; the costs are today's, with either plan's shares."""
    found = []
    if old.lanes != new.lanes:
        found.append(f"lanes {old.lanes} -> {new.lanes}")
    if old.congestion != new.congestion:
        found.append(f"congestion control {old.congestion or 'as set'} -> {new.congestion or 'as set'}")
    found += _changed("pacing of a lane", _speed(old.pacing), _speed(new.pacing))
    if old_cost is not None and cost is not None and (old_cost != cost or old.choices != new.choices):
        gain, nbytes = _gain(old, new, world, old_cost, cost)
        if gain >= MATERIAL:
            names = [chosen(plan.choices.get("all_reduce", [(0, "ring")]), nbytes) for plan in (old, new)]
            found.append(f"all_reduce of {nbytes} bytes {' -> '.join(names)}{', other shares' * (old_cost != cost)}")
    return found


def _gain(old: m.Plan, new: m.Plan, world: int, old_cost: LinkCost, new_cost: LinkCost) -> tuple[float, int]:
    """How many times faster the new choices and shares make all-reduces at most, and of how many bytes."""

    def seconds(plan: m.Plan, cost: LinkCost, nbytes: int) -> float:
        name = chosen(plan.choices.get("all_reduce", [(0, "ring")]), nbytes)
        return inf if name == "hierarchical" else predicted(name, "all_reduce", nbytes, world, cost)

    if world < 2 or any(
        name == "hierarchical" for plan in (old, new) for _, name in plan.choices.get("all_reduce", [])
    ):
        return 1.0, 0
    return max(
        (seconds(old, old_cost, nbytes) / max(seconds(new, new_cost, nbytes), 1e-9), nbytes) for nbytes in _JUDGED
    )


# ---- the ring ---------------------------------------------------------------------------------------


def _order(
    measures: Measures, members: Sequence[Member], bad: Sequence[tuple[int, int]], material: float, *, free: bool
) -> tuple[Sequence[Member], list[str]]:
    present = {member.mid: member for member in members}
    order: Sequence[int] | None
    if len(members) <= (SEARCHED if free else EXACT_BEST):
        found = better_ring(list(present), *_matrices(measures, members), bad, material=material)
        order = found.order if found is not None else None
    else:  # too many, or survivors wait for it: as they are, but around pairs that cannot reach each other
        order = ring_order(list(present), bad)
    if order is None:
        return members, []
    ordered = [present[mid] for mid in order]
    if not free or ordered == members:
        return ordered, []
    old, new = ring_of(measures, members), ring_of(measures, ordered)
    gains = []
    if new.bottleneck > old.bottleneck > 0:
        gains += _changed("bottleneck", _speed(old.bottleneck), _speed(new.bottleneck))
    gains += _changed("once around", format_duration(old.latency, 3), format_duration(new.latency, 3))
    return ordered, [f"ring order {', '.join(gains)}"] if gains else ["ring order"]


def ring_of(measures: Measures, members: Sequence[Member]) -> Ring:
    """The members' ring as it was measured, edges within a machine left out.

    The bottleneck is 0 where an edge is not known, inf where all are within a machine. Unknown latencies are left out.
    """
    edges = _edges(members)
    return Ring(
        tuple(member.mid for member in members),
        min((measures.bandwidth(one.name, other.name) for one, other in edges), default=inf),
        sum(measures.rtt(one.name, other.name) / 2 for one, other in edges),
    )


def _matrices(measures: Measures, members: Sequence[Member]) -> tuple[list[list[float]], list[list[float]]]:
    """Bandwidth and latency between members, coarsely; what is not known is as the median of what is."""
    speeds, delays = [], []
    for one in members:
        for other in members:
            near_by = near(one.daemon, other.daemon)
            speeds.append(LOCAL_BANDWIDTH if near_by else measures.bandwidth(one.daemon.name, other.daemon.name))
            delays.append(LOCAL_LATENCY if near_by else measures.rtt(one.daemon.name, other.daemon.name) / 2)
    apart = [not near(one.daemon, other.daemon) for one in members for other in members]
    usual_speed = _median([speed for speed, far in zip(speeds, apart, strict=True) if far and speed], 1.0)
    usual_delay = _median([delay for delay, far in zip(delays, apart, strict=True) if far and delay], 0.0)
    speeds = [BANDWIDTH_GRAIN ** round(log(speed or usual_speed, BANDWIDTH_GRAIN)) for speed in speeds]
    delays = [LATENCY_GRAIN * round((delay or usual_delay) / LATENCY_GRAIN) for delay in delays]
    count = len(members)
    rows = range(0, count * count, count)
    return [speeds[at : at + count] for at in rows], [delays[at : at + count] for at in rows]


def _median(values: list[float], nothing: float) -> float:
    return sorted(values)[len(values) // 2] if values else nothing


def near(one: Daemon, other: Daemon) -> bool:
    """Whether the daemons are on one machine: no path between them is measured."""
    return one is other or "" != _machine(one) == _machine(other)


def _machine(daemon: Daemon) -> str:
    """The host that it is at, behind a NAT by its own address, too; "": it is at several."""
    return " ".join(filter(None, (machine(daemon.addresses), machine(daemon.hints) if daemon.hints else "")))


def _place(daemon: Daemon) -> str:
    """Its machine; where that is not known it is alone in a place of its own."""
    return _machine(daemon) or daemon.name


def sites_of(daemons: Sequence[Daemon]) -> list[str]:
    """Where each member's daemon is: the site that its operator has named, else a machine that several share; else "".

    Where all are on one machine it is no site.
    """
    hosts = [_machine(daemon)[:SITE_LENGTH] for daemon in daemons]
    beside = Counter(hosts)
    shared = {host for host in beside if beside[host] > 1} if len(beside) > 1 else set()
    return [daemon.site or (host if host in shared else "") for daemon, host in zip(daemons, hosts, strict=True)]


def is_local(members: Sequence[Member]) -> bool:
    """Whether all members are on one machine: nothing is measured there, and nothing to be planned."""
    hosts = {_machine(member.daemon) for member in members}
    return len(hosts) == 1 and "" not in hosts


class _Known(NamedTuple):
    """What is known of a path between two machines."""

    source: Daemon
    target: Daemon
    bandwidth: float  # 0: not known
    rtt: float  # likewise


def _paths(measures: Measures, daemons: Sequence[Daemon]) -> list[_Known]:
    """Those that were measured: of many members few have been, so nothing here looks at every pair."""
    named = {daemon.name: daemon for daemon in daemons}
    where = {daemon.name: _place(daemon) for daemon in daemons}
    return [
        _Known(named[one], named[other], path.bandwidth, measures.rtt(one, other))
        for (one, other), path in measures.paths.among(named)
        if where[one] != where[other]
    ]


# ---- connections ------------------------------------------------------------------------------------


def _wire(
    measures: Measures, paths: Sequence[_Known], members: Sequence[Member], before: Planned | None, *, local: bool
) -> Planned:
    """Lanes, pacing and congestion control, in a plan that says nothing else yet; and what was tried for them."""
    daemons = list(dict.fromkeys(member.daemon for member in members))
    start = min(daemon.lanes for daemon in daemons)
    tried: dict[int, float] = dict(before.tried) if before is not None else {}
    settled = before is not None and before.settled
    lanes = before.plan.lanes if before is not None and before.plan.turns else start  # within a machine fewer do
    pacing, congestion = 0, ""
    sharing, threads = 1, _threads(members)
    if not local:
        congestion = _congestion(paths, daemons)
        looks = before.looks if before is not None else 0
        lanes = max(lanes, _windows(paths, daemons))
        if congestion != "bbr":  # which fills a path with any number of them
            lanes, settled = _lanes(measures, daemons, lanes, tried, looks, settled=settled)
        if _far(paths):
            sharing, threads = FAR_SHARING, THREADS  # whoever joins: links that are made anew are cold
            carried = max(measures.uplink(daemon.name, lanes) for daemon in daemons)  # around a ring all carry the same
            lost = _lost(measures, members)
            uplink = max(_uplink(measures, members, lanes), carried)
            pacing = int(_pace(uplink, carried, lost, before) / lanes)
    groups = max(1, min(threads, lanes // sharing))
    plan = m.Plan(lanes, STRIPE, True, {}, [], pacing, congestion, lane_groups=groups)
    looks = before.looks if before is not None and before.plan.lanes == lanes else 0
    return Planned(plan, None, tried, settled, looks)


def _lanes(
    measures: Measures, daemons: Sequence[Daemon], lanes: int, tried: dict[int, float], looks: int, *, settled: bool
) -> tuple[int, bool]:
    """Twice as many as long as that carries more. *tried* is added to."""
    most = min(_most_lanes(daemon) for daemon in daemons)
    carried = _slowest_uplink(measures, daemons, lanes)
    if settled or not carried:
        return lanes, settled
    if looks < LANE_LOOKS:
        return lanes, False
    tried[lanes] = carried
    if carried >= FILLED * _capacity(measures, daemons):
        return lanes, True
    fewer = tried.get(lanes // 2, 0.0)
    if fewer and carried < LANE_GAIN * fewer:
        return lanes // 2, True
    if 2 * lanes > most:
        return lanes, True
    return 2 * lanes, False


def _windows(paths: Sequence[_Known], daemons: Sequence[Daemon]) -> int:
    """Lanes (a power of two) whose send buffers hold what is under way on the longest path at full speed."""
    under_way = max((path.rtt * path.bandwidth for path in paths), default=0.0)
    most = min(_most_lanes(daemon) for daemon in daemons)
    lanes = 1
    while lanes * LANE_WINDOW < under_way and lanes < most:
        lanes *= 2
    return lanes


def _most_lanes(daemon: Daemon) -> int:
    return max(daemon.max_lanes, daemon.lanes)


def _slowest_uplink(measures: Measures, daemons: Sequence[Daemon], lanes: int) -> float:
    """Bytes per second of the daemon that sends least with *lanes*; 0 while one of them is not known."""
    return min((measures.uplink(daemon.name, lanes) for daemon in daemons), default=0.0)


def _capacity(measures: Measures, daemons: Sequence[Daemon]) -> float:
    """Bytes per second of the slowest uplink, as probes of paths found it; inf while one of them is not known."""
    found = (measures.probed(daemon.name) for daemon in daemons)
    return min((speed or inf for speed in found), default=inf)


def _edges(members: Sequence[Member]) -> list[tuple[Daemon, Daemon]]:
    """Edges of the ring, without those within a machine."""
    daemons = [member.daemon for member in members]
    return [ends for ends in [*pairwise(daemons), (daemons[-1], daemons[0])] if not near(*ends)]


def _lost(measures: Measures, members: Sequence[Member]) -> float:
    """The share of packets that is lost on the worst edge of the ring."""
    paths = [measures.paths.get((one.name, other.name)) for one, other in _edges(members)]
    return max((path.loss for path in paths if path is not None), default=0.0)


def _uplink(measures: Measures, members: Sequence[Member], lanes: int) -> float:
    """Bytes per second of the slowest edge of the ring that is known, else of the slowest uplink; 0: nothing is.

    Of each, the larger of what operations and probes found.
    """
    edges = _edges(members)
    known = [max(measures.uplink(one.name, lanes), measures.bandwidth(one.name, other.name)) for one, other in edges]
    if not any(known):
        daemons = [member.daemon for member in members]
        known = [max(measures.uplink(one.name), measures.probed(one.name)) for one in daemons]
    return min(filter(None, known), default=0.0)


def _pace(uplink: float, carried: float, lost: float, before: Planned | None) -> float:
    """Bytes per second of all lanes of a link, 0 for no limit: the slowest *uplink*, since what is sent faster queues.

    The uplink may be known too low, since probes and operations find little where a machine is busy with something
    else. So a pace is lowered only where packets are *lost*. The daemons raise their links' pace above the plan's where
    it is the limit, and what operations carry then is the uplink of the next plan.
    """
    if before is None or not uplink:
        return uplink or (before.plan.pacing * before.plan.lanes if before is not None else 0.0)
    old = before.plan.pacing * before.plan.lanes
    # Operations that sent little say nothing of what is too fast.
    known = uplink > old or (carried >= FILLED * uplink and lost >= PACE_LOSS)
    return uplink if known and not old / PACING_STAYS < uplink < old * PACING_STAYS else old


def _congestion(paths: Sequence[_Known], daemons: Sequence[Daemon]) -> str:
    """What fits the paths: bbr over long ones, cubic over short ones; "" where a daemon lacks it or was told another.

    Over a long path loss and full queues stop cubic. On a short narrow one many bbr lanes leave a quarter unused.
    """
    best = "bbr" if _far(paths) else "cubic"
    return best if all(best in daemon.congestion_controls for daemon in daemons) else ""


def _far(paths: Sequence[_Known]) -> bool:
    return any(path.rtt > FAR for path in paths)


# ---- algorithms -------------------------------------------------------------------------------------


def _cost(measures: Measures, paths: Sequence[_Known], members: Sequence[Member], owning: float) -> LinkCost | None:
    """The cost of the slowest links and uplinks, to two digits; None if no round trip is known."""
    delay = max((path.rtt for path in paths), default=0.0) / 2
    if not delay:
        return None
    fastest = _uplinks(measures, paths, members)
    beside = Counter(member.daemon.name for member in members)
    beta = max(count / (fastest[daemon] or UPLINK) for daemon, count in beside.items())
    return LinkCost(_two_digits(delay + OVERHEAD), _two_digits(beta), HANDLING, owning)


def _uplinks(measures: Measures, paths: Sequence[_Known], members: Sequence[Member]) -> dict[str, float]:
    """Bytes per second that leave each daemon, by its name; 0: not known."""
    found = {member.daemon.name: measures.uplink(member.daemon.name) for member in members}
    for path in paths:
        found[path.source.name] = max(found[path.source.name], path.bandwidth)
    return found


def _speeds(measures: Measures, paths: Sequence[_Known], members: Sequence[Member]) -> list[float]:
    """Bytes per second of each member: of its uplink, or its downlink; [] while one uplink is not known.

    What arrives may be limited by its sender. So a downlink is known where someone who sends clearly more elsewhere
    does not reach it faster. Those that are near the median are as fast as it: probes are no more exact.
    """
    up = _uplinks(measures, paths, members)
    if not all(up.values()):
        return []
    arrives, offered = dict.fromkeys(up, 0.0), dict.fromkeys(up, 0.0)
    for path in paths:
        if path.bandwidth:
            name = path.target.name
            arrives[name] = max(arrives[name], path.bandwidth)
            offered[name] = max(offered[name], up[path.source.name])
    down = {name: arrives[name] if offered[name] > BANDWIDTH_GRAIN * arrives[name] > 0 else inf for name in up}
    beside = Counter(member.daemon.name for member in members)
    names = [member.daemon.name for member in members]
    speeds = [min(up[name], down[name]) / beside[name] for name in names]
    usual = _median(speeds, 0.0)
    return [usual if usual / BANDWIDTH_GRAIN < speed < usual * BANDWIDTH_GRAIN else speed for speed in speeds]


def _owning(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Time of a direct all_reduce's bytes with these shares, of that with even ones, to two digits."""
    return _two_digits(busiest(shares, speeds) / busiest([], speeds)) if speeds else 1.0


def _choices(
    paths: Sequence[_Known], members: Sequence[Member], cost: LinkCost | None
) -> dict[str, list[tuple[int, str]]]:
    if cost is None or len(members) < 2:
        return {}
    return {kind: list(entries) for kind, entries in _chosen(len(members), cost, _sites(paths, members)).items()}


@lru_cache(maxsize=64)
def _chosen(world: int, cost: LinkCost, sites: Sites | None) -> dict[str, list[tuple[int, str]]]:
    return choices(world, cost, sites=sites)


def _sites(paths: Sequence[_Known], members: Sequence[Member]) -> Sites | None:
    """Where the members are, if they are at two sites at least, or one of its own, and one has two members."""
    sites = sites_of([member.daemon for member in members])
    sizes = Counter(site or f" {member.mid}" for site, member in zip(sites, members, strict=True))
    if not 1 < len(sizes) < len(members):
        return None
    inside = [path for path in paths if path.source.site and path.source.site == path.target.site]
    delay = max((path.rtt for path in inside), default=0.0) / 2
    speed = min(filter(None, (path.bandwidth for path in inside)), default=0.0)
    cost = LinkCost(
        _two_digits(delay + OVERHEAD) if delay else NEAR.alpha, _two_digits(1 / speed) if speed else NEAR.beta, HANDLING
    )
    return Sites(tuple(sizes.values()), cost)


def _two_digits(value: float) -> float:
    """Round to two digits: then small changes in measurements change no plan."""
    return round(value, 1 - floor(log10(value)))


def _speed(value: float) -> str:
    return format_rate(value, 3) if value else "unlimited"


def _changed(what: str, old: str, new: str) -> list[str]:
    """The change in words; nothing where both ends read the same."""
    return [f"{what} {old} -> {new}"] if old != new else []

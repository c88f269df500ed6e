"""Link faults: links that are down while both ends live. Dial again, route around, evict last (R17). Pure.

Each complaint (LinkDown) waits link_settle for an end to turn out dead, or 2 doubt_grace while witnesses are asked
whether one is. A link that is broken is not judged here yet: its ends have link_timeout to mend it.
"""

from __future__ import annotations

from math import inf

from wancoll.errors import ProtocolError
from wancoll.limits import keep_newest
from wancoll.wire import messages as m
from wancoll_master.core import p2p
from wancoll_master.core.liveness import confirming
from wancoll_master.core.losses import end_epoch, lose
from wancoll_master.core.state import Complaint, Group, Member, Step, Trouble, clip, names
from wancoll_master.plan.topology import pair, ring_order

LOSSES = 5  # times that a link is lost while something runs that could have ended, and only dialled again
BAD_PAIR_SECONDS = 60.0  # how long a pair that cannot reach each other is kept apart
_TROUBLES_SECONDS = 600.0  # after they were last told of
_OLDER = 0.5  # seconds that a link must have been up before the other end lost it, to be taken for the same one


def link_down(step: Step, member: Member, message: m.LinkDown) -> None:
    """Note the complaint; settle() acts once the other end had time to turn out dead."""
    group = member.group
    if message.kind not in ("broken", "lost", "unreachable", "up"):
        expected = "broken, lost, unreachable, up"
        raise ProtocolError("complains of an unknown kind", expected=expected, got=message.kind[:32])
    if message.other == member.mid:
        raise ProtocolError("complains about a link to itself")
    other = step.state.members.get(message.other)
    if other is None or other.group is not group or not other.in_epoch:
        return
    if message.kind == "up":
        ends = pair(member.mid, other.mid)
        _came_up(group, [one for one in _unreachable(group) if one.pair == ends and not one.sends])
        return
    if message.kind == "broken":  # it goes on by itself, or an end turns out dead
        told_late(step, member, message)
        _acted(group, {(member.name, other.name)}, "its lanes are dialled again")
        return
    key = member.mid, other.mid, message.sends
    known = group.current.complaints.get(key)
    if known is None and len(group.current.complaints) >= step.limits.bad_pairs:
        return  # enough to act upon
    if not group.current.complaints:
        group.current.complained_at = step.now
    if known is None or "lost" in (known.kind, message.kind):  # one that is lost had come up after all
        head, told = (member, other, message.sends, message.kind), clip(message.reason, 300)
        group.current.complaints[key] = Complaint(*head, told, step.now, group.committed, group.p2p_count)
    _note(step, group, member, other, message)
    confirming.link_lost(step, other.daemon)
    if message.kind == "unreachable" and not message.sends:
        _avoid(step, group, pair(member.mid, other.mid))
    _settle_at(step, group, min(group.current.settle_at, step.now + step.limits.link_settle))


def _avoid(step: Step, group: Group, ends: tuple[int, int]) -> None:
    keep_newest(group.bad_pairs, ends, step.now + BAD_PAIR_SECONDS, step.limits.bad_pairs)


def told_late(step: Step, member: Member, message: m.LinkDown) -> None:
    """Note a complaint that ends no epoch, or is of an earlier one, which perhaps the other end's has ended."""
    other = step.state.members.get(message.other)
    if other is not None and other.group is member.group and other is not member:
        _note(step, member.group, member, other, message)
        _same_as_other_end(member.group, member, other)
        confirming.link_lost(step, other.daemon)


def settle(step: Step, group: Group) -> None:
    """Act on the complaints: both ends of these links live."""
    group.current.settle_at = inf
    if group.stopped:
        return  # a new epoch follows anyway
    until = group.current.complained_at + 2 * step.limits.doubt_grace
    if until > step.now and confirming.open_in(step, group):  # an end may turn out dead
        _settle_at(step, group, min(until, step.now + step.limits.doubt_grace))
        return
    complaints = group.current.complaints
    for told in _lost(group):
        _acted(group, {(told.who.name, told.whom.name)}, "dialled again")
        if (told.whom.mid, told.who.mid, told.sends) not in complaints:
            _tell_other_end(step, group, told)
    _count_losses(step, group)
    for told in complaints.values():
        if told.kind == "unreachable" and told.sends:
            _end_pairs(step, group, told)
    for key, told in list(complaints.items()):
        if told.sends and not p2p.concerned(group, told):
            del complaints[key]  # nothing runs on the link any more: no epoch has to end for it
    unreachable = _unreachable(group)
    if unreachable and _avoided(step, group, unreachable):
        return
    waits = {told.pair for told in _unreachable(group)}
    for told in _lost(group):
        if told.sends or told.pair not in waits:  # else it is the other end's word for a link that is not judged yet
            end_epoch(step, group, f"the link of {told.who.name} to {told.whom.name} broke: {told.reason}")
            return


def _avoided(step: Step, group: Group, unreachable: list[Complaint]) -> bool:
    """Whether the epoch ends since these links for collectives cannot be made: with another ring, or without an end."""
    first, ends = unreachable[0], {(told.who.name, told.whom.name) for told in unreachable}
    text = f"{first.who.name} and {first.whom.name} cannot reach each other ({first.reason})"
    apart = group.apart()
    concerned = any(told.pair in column for column in apart.values() for told in unreachable)
    if not concerned or ring_order([member.mid for member in group.members[:: group.shards]], apart) is not None:
        step.record(group, "link", f"{text}: {_words(step, group, ends)}")
        _acted(group, ends, "routed around")
        end_epoch(step, group, f"{text}: other ways around")
        return True
    if all(told.committed < group.committed for told in unreachable):
        _came_up(group, unreachable)  # operations went through since
        return False
    if (until := _blame_at(step, first)) > step.now:
        _settle_at(step, group, until)  # whose fault it is shows when others have complained, too
        return False
    _evict(step, group, [told.pair for told in unreachable], ends, f"{text}; {_words(step, group, ends)}")
    return True


def _came_up(group: Group, complaints: list[Complaint]) -> None:
    """Take back what was told of links that could not be made."""
    for told in complaints:
        del group.current.complaints[told.who.mid, told.whom.mid, told.sends]
        group.bad_pairs.pop(told.pair, None)
    _acted(group, {(told.who.name, told.whom.name) for told in complaints}, "nothing: it came up")


def _unreachable(group: Group) -> list[Complaint]:
    return [told for told in group.current.complaints.values() if told.kind == "unreachable"]


def _lost(group: Group) -> list[Complaint]:
    return [told for told in group.current.complaints.values() if told.kind == "lost"]


def _settle_at(step: Step, group: Group, at: float) -> None:
    group.current.settle_at = at
    step.alarm(at)


def _count_losses(step: Step, group: Group) -> None:
    """Take a link that comes up each time, and is lost each time something runs on it, for unreachable."""
    runs = _runs_one(group)
    lost = [told for told in _lost(group) if (p2p.concerned(group, told) if told.sends else runs)]
    for key in dict.fromkeys((*told.pair, told.sends) for told in lost):
        if key in group.losses or len(group.losses) < step.limits.bad_pairs:
            group.losses[key] = group.losses.get(key, 0) + 1
    for told in lost:
        times = group.losses.get((*told.pair, told.sends), 0)
        if times <= LOSSES:
            continue
        told.reason = clip(f"lost {times} times, and nothing that ran on it has ended: {told.reason}", 300)
        if told.sends:
            _end_pairs(step, group, told)
        else:
            told.kind = "unreachable"
            told.at -= step.limits.link_timeout / 2  # others had the time to complain
            _avoid(step, group, told.pair)


def _runs_one(group: Group) -> bool:
    """Whether all members have called an operation that is open: it could have ended."""
    seq = group.first_open
    return not group.small and all(max(one.called[1], one.done_upto) >= seq for one in group.members)


def _blame_at(step: Step, first: Complaint) -> float:
    """When an end is evicted for links that cannot be made; not while the master hears nobody (R11)."""
    until = first.at + step.limits.link_timeout / 2
    if step.state.deaf_until > step.now:
        return max(until, min(step.state.deaf_until, step.now + step.limits.rejoin_grace))
    return until


def _end_pairs(step: Step, group: Group, told: Complaint) -> None:
    """End what runs on a link for sends and recvs that cannot be made; the one for collectives has its own word."""
    why = f"{told.who.name} cannot reach {told.whom.name} ({told.reason})"
    count = p2p.part(step, group, told, why)
    if count:
        step.record(group, "link", f"{p2p.APART}: {why}; ended {count} of them")
        _acted(group, {(told.who.name, told.whom.name)}, "ended sends and recvs")


def _tell_other_end(step: Step, group: Group, told: Complaint) -> None:
    """Let the other end drop the link: it may not notice for long, and would refuse new connections, or make none."""
    age = step.now - told.at + _OLDER
    head = group.name, told.whom.mid, group.epoch
    step.send(told.whom.daemon.conn, m.Redial(*head, [told.who.mid], age, told.reason, told.sends))


def _evict(step: Step, group: Group, complained: list[tuple[int, int]], ends: set[tuple[str, str]], text: str) -> None:
    """Evict the end that cannot reach the most others, the newer of two equals, until a ring is possible."""
    left = [member.mid for member in group.members[:: group.shards]]  # an island is out with the first of it
    victims, apart, firsts = list[int](), group.apart(), group.firsts()
    complained = [(firsts[one], firsts[other]) for one, other in complained]
    while ring_order(left, apart) is None:
        bad = [ends for ends in apart if ends[0] in left and ends[1] in left]
        blamed = [mid for ends in complained for mid in ends if ends[0] in left and ends[1] in left]
        worst = max(blamed or [mid for ends in bad for mid in ends], key=lambda mid: (sum(mid in e for e in bad), mid))
        left.remove(worst)
        victims.append(worst)
    members = [member for member in group.members if member.mid in victims]
    _acted(group, ends, f"evicted {names(members)}")
    why = f"{text}, and no ring order avoids that"
    lose(step, dict.fromkeys(members, why), "evicted", tell=True, cause="link")


# ---- what people are told -----------------------------------------------------------------------------


def _note(step: Step, group: Group, source: Member, target: Member, message: m.LinkDown) -> None:
    """*source* says that its link to *target* is down."""
    kind, why = message.kind[:32], message.reason
    key = source.name, target.name
    known = group.troubles.get(key)
    if known is None or step.now - known.last > _TROUBLES_SECONDS:
        known = Trouble(kind, why, step.now, step.now)
    known.kind, known.why, known.last = kind, clip(why, 300), step.now
    known.times += 1
    if kind != "unreachable" and not message.sends:
        known.lost_at = step.now
    keep_newest(group.troubles, key, known, step.limits.troubles)


def _acted(group: Group, pairs: set[tuple[str, str]], what: str) -> None:
    """The master did *what* about these pairs of names, in whichever direction they were told."""
    for (source, target), trouble in group.troubles.items():
        if (source, target) in pairs or (target, source) in pairs:
            trouble.done = what


def _same_as_other_end(group: Group, source: Member, target: Member) -> None:
    """What the master did when *target* told of the pair, it did for *source*, too."""
    other = group.troubles.get((target.name, source.name))
    if other is not None:
        group.troubles[source.name, target.name].done = other.done


def pairs(group: Group, now: float) -> list[m.PairStatus]:
    """For `wancoll status`, newest first."""
    return [
        m.PairStatus(*ends, one.kind, one.why, now - one.since, now - one.last, one.times, one.done)
        for ends, one in reversed(group.troubles.items())
        if now - one.last <= _TROUBLES_SECONDS
    ]


def _words(step: Step, group: Group, pairs: set[tuple[str, str]]) -> str:
    """What was told of these pairs, in either direction, in a sentence."""
    told = [
        f"{source} cannot reach {target} for {step.now - one.since:.1f} s ({one.why})"
        if one.kind == "unreachable"
        else f"{source} lost its link to {target} {step.now - one.since:.1f} s ago ({one.why})"
        for (source, target), one in group.troubles.items()
        if (source, target) in pairs or (target, source) in pairs
    ]
    return clip("; ".join(told), 600)

"""DiLoCo: replicas train alone for many steps, and average what they have come to. Over a Communicator.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105), with the
fragments, the overlap and the mixing of "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512).

Each member has two sets of parameters. The model's are its own, and its inner optimizer changes them. The *outer* ones
are the same bytes on all members. In an *outer step* of a fragment each member sends its difference, outer parameters
minus its own, times its tokens, beside its tokens; the sum of the one divided by the sum of the other is the gradient
of an SGD with Nesterov's momentum, which all members compute alike on the CPU. Then the model takes the new outer
parameters over.

    begin   the fragment's difference goes into shared memory, and an all_reduce of it is posted
    ...     the next inner steps are computed meanwhile
    end     its result is waited for, the outer parameters move, the model follows
    ask     once a round: who waits may come in; this is on its way during the next inner steps, too
    admit   who came in is handed the outer parameters, their momentum and the step

With outer="feedback" it is a plain SGD: what sparse codecs leave for later takes the place of momentum, and is decayed
for that (SparseLoCo: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706).

What a codec loses of a difference is kept and sent with the next one (error feedback). A member that is lost in an
outer step has sent nothing; the others go on with theirs, and lose no inner step. With a grace time nor do they wait
for one that is late: it counts as zeros with no tokens, gets the same outer parameters, and all that it would have sent
goes with its next difference, as if a codec had lost it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wancoll.client.checks import check_seconds, refused, unavailable, whole, whole_number
from wancoll.client.codecs import ErrorFeedback, coding
from wancoll.client.communicator import CodecName, Communicator
from wancoll.client.memory.tensors import check_plain, kind_of, local_part, spread_of
from wancoll.client.work import Work
from wancoll.collective import DType, Receipt
from wancoll.errors import ConfigError, WancollError
from wancoll.torch.training.fragments import Act, cut, most_fragments, turn

_OUTER = ("nesterov", "feedback")
# What all members give alike, beside what operations compare.
_ALIKE = ("every", "delay", "mixing", "lr", "momentum", "decays")


@dataclass(frozen=True, slots=True)
class OuterStep:
    """One outer step that has ended, the same on all members but for *receipt* and *counted*.

    Attributes:
        fragment: which one.
        step: the inner step after which it began.
        weights: tokens of each member whose difference is in it, by name, as the result has them: what travelled with
            the differences is what they are divided by.
        tokens: their sum; 0.0: nobody had trained, and nothing has changed.
        counted: whether this member's difference is in it; else it counts in the fragment's next one.
        receipt: of the all_reduce.
    """

    fragment: int
    step: int
    weights: dict[str, float]
    tokens: float
    counted: bool
    receipt: Receipt


@dataclass(slots=True, eq=False)
class _Fragment:
    """A part of the model, and what is known of it."""

    name: str  # of its residual
    parameters: list[torch.Tensor]  # of the model
    outer: torch.Tensor  # the same on all members, float32, flat, on the CPU
    velocity: torch.Tensor  # of the outer optimizer
    label: str  # of its outer steps: of which DTensors they have parts
    tokens: float = 0.0  # that this member has trained on since the fragment's last outer step began
    buffer: torch.Tensor | None = None  # in the arena: a place for each member's tokens, then the values
    work: Work | None = None  # under way
    sent: float = 0.0  # tokens that it has with it
    begun: int = 0  # the inner step after which it began

    def spread(self) -> Iterable[tuple[torch.Tensor, slice]]:
        """Each parameter and where it lies in a flat tensor."""
        at = 0
        for parameter in self.parameters:
            yield parameter, slice(at, at + parameter.numel())
            at += parameter.numel()


class DiLoCo:
    """Outer steps for a model that an optimizer of the caller's trains.

    ::

        diloco = DiLoCo(model.parameters(), every=100, fragments=4, delay=10, mixing=0.5)

        def train(comm):
            diloco.join(comm)
            while diloco.steps < STEPS:
                loss_of(next_batch()).backward()
                inner.step()
                inner.zero_grad()
                diloco.step(tokens=batch_tokens)

        wancoll.run(train, start_world=4)

    All members make the same calls. A member that comes later, or comes back, begins with join(), too, and finds
    `steps` where the others are. Whatever is raised, the outer parameters are those of the last outer step that ended;
    what was trained since is in the model, and counts in the next one.

    Other collectives should go over a communicator of another group. While there are none on this one, and a delay is
    given, nobody waits for the master to hear who wants to join: that is asked for ahead.

    The model's buffers (of BatchNorm, for example) and the inner optimizer's state are the member's own.

    Args:
        parameters: of the model, of floating dtypes; on any device. Those that need no gradient are left out.
        every: inner steps of a round; each fragment has one outer step in it.
        fragments: how many parts the model is sent in: at most one for each parameter, and *every*; with a delay
            *every* / 2.
        delay: inner steps for which a fragment is under way before the model waits for it, 0 to *every* - 1. What is
            *every* / *fragments* or more is cut short once a round, where members may join.
        mixing: how much of a member's own parameters stays when a fragment ends, 0 to below 1. The paper takes 0.5
            where there is a delay: with 0 the steps made meanwhile are lost for that fragment.
        lr: of the outer SGD.
        momentum: of the outer SGD, Nesterov's; with outer="feedback" what is left of a residual in the next outer step.
        codec: how differences travel; see Communicator.all_reduce. With a sparse one ("top1.5%") tokens are rounded to
            8 bits for the average.
        outer: "nesterov", or "feedback" for sparse codecs; SparseLoCo's authors take momentum 0.95 and lr 1 then.
        grace: seconds for which an outer step waits for members that have not begun it, once one has; None: as long as
            it takes. Where members join all are waited for, once a round.

    Raises:
        ConfigError: an argument that cannot be used.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        every: int = 100,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
        lr: float = 0.7,
        momentum: float = 0.9,
        codec: CodecName = "int8",
        outer: str = "nesterov",
        grace: float | None = None,
    ) -> None:
        trained, spreads = _trained(parameters)
        _check(trained, every, fragments, delay, {"mixing": mixing, "momentum": momentum}, lr)
        self._every, self._delay, self._mixing = every, delay, float(mixing)
        self._lr, self._momentum, self._codec = float(lr), float(momentum), codec
        check_seconds("DiLoCo", "grace", grace, zero=False, most=1e9, none="to wait for all")
        self._grace = grace
        # A member's tokens have a block of the codec for themselves: a value alone in its block stays as it is.
        found = coding("DiLoCo", DType.float32, codec, None, "nearest", 0).codec
        self._width, self._sparse = found.block[0] if found else 1, found.sparse
        if outer not in _OUTER:
            raise unavailable("DiLoCo", "outer", outer, _OUTER)
        self._decays = outer == "feedback"
        self._fragments = []
        for p, indices in enumerate(cut([each.numel() for each in trained], fragments)):
            mine = [trained[i] for i in indices]
            flat = torch.cat([_flat(each) for each in mine])
            label = ", ".join(filter(None, (spreads[i] for i in indices)))
            self._fragments.append(_Fragment(f"diloco/{p}", mine, flat, torch.zeros_like(flat), label))
        self._counts = torch.zeros(2, dtype=torch.int64)  # inner steps, outer steps
        self._feedback = ErrorFeedback(self._momentum if self._decays else 1.0)
        self._comm: Communicator | None = None
        self._asked: Work | None = None  # an update_membership that is under way
        self._admitted = 0  # seq of the operation that the last admit, or join, ended with
        self._ended = 0  # of the last outer step
        self._epoch = 0  # in which all members were known to have the same state
        self._roster: tuple[str, ...] = ()  # the members then: whose place in a buffer is whose
        self._name = ""  # this member's own, then

    # ---- what the caller sees ------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Inner steps that the group has made."""
        return int(self._counts[0])

    @property
    def outer_steps(self) -> int:
        """Outer steps that have ended, of all fragments."""
        return int(self._counts[1])

    @property
    def outer(self) -> tuple[torch.Tensor, ...]:
        """Each fragment's outer parameters: float32, flat, the same bytes on all members. Not to be changed."""
        return tuple(fragment.outer for fragment in self._fragments)

    @property
    def under_way(self) -> tuple[int, ...]:
        """Fragments whose outer step has begun and not ended."""
        return tuple(p for p, fragment in enumerate(self._fragments) if fragment.work is not None)

    def join(self, comm: Communicator) -> None:
        """Begin, or begin again, on *comm*: all members get one state, that of whoever is furthest.

        A collective. A newcomer calls it first of all, and the members call it from step(). What was under way is
        waited for first. If another member's state wins, the model takes its parameters over, and what was trained
        here since the last outer step is lost; else the model stays as it is.

        Raises:
            ConfigError: this member's every, delay, mixing, lr or momentum is not that of who has the state.
            WancollError: as of Communicator.sync_state.
        """
        for fragment in self._fragments:
            with contextlib.suppress(WancollError):  # then it has not happened, and counts in the next one
                self._end(fragment)
        asked, self._asked = self._asked, None
        if asked is not None:
            with contextlib.suppress(WancollError):
                asked.wait()
        if comm is not self._comm:
            self._comm = comm
            for fragment in self._fragments:
                fragment.buffer = None
        self._catch_up(comm)

    def step(self, tokens: float = 1.0) -> list[OuterStep]:
        """Call it after each step of the inner optimizer.

        Args:
            tokens: that this step has trained on here; members count by them. 0: nothing.

        Returns:
            The outer steps that have ended now.

        Raises:
            WancollError: an outer step has not happened; connect again where that is needed, and join().
        """
        comm = self._comm
        if comm is None:
            raise ConfigError("no group yet", who="DiLoCo.step", expected="join(comm) first", got="no call of it")
        weight = float(tokens)
        if not 0.0 <= weight < float("inf"):
            raise refused("DiLoCo.step", "tokens", tokens, "a number, 0 or more")
        self._counts[0] += 1
        for fragment in self._fragments:
            fragment.tokens += weight
        ended = []
        for act, p in turn(self.steps, self._every, len(self._fragments), self._delay):
            match act:
                case Act.begin:
                    self._begin(comm, self._fragments[p])
                case Act.end:
                    record = self._end(self._fragments[p])
                    if record is not None:
                        ended.append(record)
                case Act.ask:
                    if self._ended == self._admitted + len(self._fragments):  # nobody has called anything else here
                        self._asked = comm.update_membership(async_op=True)
                case Act.admit:
                    asked, self._asked = self._asked, None
                    receipt = comm.update_membership() if asked is None else asked.wait()
                    self._admitted = receipt.seq
                    if receipt.epoch != self._epoch:
                        self._catch_up(comm)  # as a newcomer does in join()
        return ended

    def state_dict(self) -> dict[str, Any]:
        """Copy what a checkpoint needs beside the model and the inner optimizer.

        Raises:
            ConfigError: an outer step is under way.
        """
        if self.under_way:
            raise ConfigError(
                "an outer step is under way", who="DiLoCo.state_dict", expected="a call between two of them",
                got=f"fragments {list(self.under_way)}",
                hint="after the last step of delay there is one, and after join()",
            )  # fmt: skip
        return {
            "outer": [fragment.outer.clone() for fragment in self._fragments],
            "velocity": [fragment.velocity.clone() for fragment in self._fragments],
            "tokens": [fragment.tokens for fragment in self._fragments],
            "counts": self._counts.clone(),
            "feedback": self._feedback.state_dict(),
            "roster": list(self._roster),
            "name": self._name,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take *state*, as state_dict() gave it, of a DiLoCo with the same parameters and fragments; then join().

        Raises:
            ConfigError: it is of another model; nothing has changed.
        """
        sizes = [fragment.outer.numel() for fragment in self._fragments]
        for key in ("outer", "velocity"):
            if [each.numel() for each in state[key]] != sizes:
                raise ConfigError(
                    "a state of another model, or of other fragments", who=f"DiLoCo.load_state_dict: {key}",
                    expected=f"sizes {sizes}", got=str([each.numel() for each in state[key]]),
                )  # fmt: skip
        self._feedback.load_state_dict(state["feedback"])
        self._roster, self._name, self._comm = tuple(state["roster"]), str(state["name"]), None
        self._asked = None
        self._counts.copy_(state["counts"])
        for p, fragment in enumerate(self._fragments):
            fragment.outer.copy_(state["outer"][p])
            fragment.velocity.copy_(state["velocity"][p])
            fragment.tokens, fragment.work, fragment.buffer = float(state["tokens"][p]), None, None
        self._move_tokens(self._roster, self._name)  # the codec may be another one

    # ---- how it is done ------------------------------------------------------------------------------

    def _catch_up(self, comm: Communicator) -> None:
        """All members get the state of whoever is furthest, and know the same members by the same places."""
        state: dict[str, Any] = {"counts": self._counts}
        for p, fragment in enumerate(self._fragments):
            state[f"outer/{p}"], state[f"velocity/{p}"] = fragment.outer, fragment.velocity
        synced = comm.sync_state(state, revision=self.outer_steps)
        if any(name.startswith("outer/") for name in synced.tensors):  # what was trained here was another model's
            self._feedback.reset()
            for fragment in self._fragments:
                fragment.tokens = 0.0
                _take_over(fragment, 0.0)
        mine = np.array([getattr(self, f"_{name}") for name in _ALIKE], np.float64)
        receipt = comm.all_gather(mine)  # its epoch and contributors are the same for all who go on
        members = receipt.contributors
        holder = next((name for name in synced.holders if name in members), members[0])
        theirs = receipt.out[members.index(holder)]
        if not np.array_equal(theirs, mine):
            self._comm = None
            raise ConfigError(
                "members train in different ways", who=f"DiLoCo of {comm.name}",
                expected=f"as {holder}: {_settings(theirs)}", got=_settings(mine), hint="make it as there, then join()",
            )  # fmt: skip
        self._epoch, self._admitted = receipt.epoch, receipt.seq
        if (receipt.contributors, comm.name) != (self._roster, self._name):
            self._move_tokens(receipt.contributors, comm.name)

    def _move_tokens(self, roster: tuple[str, ...], name: str) -> None:
        """The members' tokens have other places from now on; what is kept of this member's own goes with it."""
        before, old = self._roster, self._name
        self._roster, self._name = roster, name
        for fragment in self._fragments:
            fragment.buffer = None
        moved = {}
        for key, residual in self._feedback.state_dict().items():
            size = next(fragment.outer.numel() for fragment in self._fragments if fragment.name == key)
            places = np.zeros(len(roster) * self._width, residual.dtype)
            if old in before:
                width = (residual.size - size) // len(before)  # of the codec that was then
                places[roster.index(name) * self._width] = residual[before.index(old) * width]
            moved[key] = np.concatenate((places, residual[residual.size - size :]))
        self._feedback.load_state_dict(moved)

    def _begin(self, comm: Communicator, fragment: _Fragment) -> None:
        """Send the fragment's difference."""
        places = len(self._roster) * self._width
        if fragment.buffer is None:
            fragment.buffer = torch.from_numpy(comm.empty(places + fragment.outer.numel(), np.float32))
        fragment.sent, fragment.tokens, fragment.begun = fragment.tokens, 0.0, self.steps
        fragment.buffer[:places] = 0
        weight = fragment.sent
        if self._sparse:  # whose levels are of this type: so it arrives as it is
            weight = torch.tensor(weight).bfloat16().item()
        fragment.buffer[self._roster.index(self._name) * self._width] = weight
        values = fragment.buffer[places:]
        for parameter, where in fragment.spread():
            values[where].copy_(parameter.detach().reshape(-1))
        torch.sub(fragment.outer, values, out=values)
        values.mul_(weight)
        try:
            fragment.work = comm.labelled(fragment.label).all_reduce(
                fragment.buffer.numpy(),
                codec=self._codec,
                feedback=self._feedback,
                name=fragment.name,
                grace=self._grace,
                async_op=True,
            )
        except BaseException:
            fragment.tokens += fragment.sent
            raise

    def _end(self, fragment: _Fragment) -> OuterStep | None:
        """Wait for what the fragment has under way, and take the step; None: nothing is."""
        work, buffer = fragment.work, fragment.buffer
        if work is None or buffer is None:
            return None
        try:
            receipt = work.wait()
        except WancollError:
            fragment.work = None
            fragment.tokens += fragment.sent
            raise
        fragment.work, self._ended = None, receipt.seq
        places = len(self._roster) * self._width
        weights = dict(zip(self._roster, buffer[: places : self._width].tolist(), strict=True))
        total = float(sum(weights.values()))
        if total > 0.0:
            self._outer_step(fragment, buffer[places:], total)
        self._counts[1] += 1
        weights = {name: weights[name] for name in receipt.contributors}
        p = self._fragments.index(fragment)
        return OuterStep(p, fragment.begun, weights, total, receipt.counted, receipt)

    def _outer_step(self, fragment: _Fragment, gradient: torch.Tensor, total: float) -> None:
        """SGD, with Nesterov's momentum or none, each operation rounded by itself: the same bits on every processor."""
        gradient.div_(total)
        if self._decays:
            fragment.outer.sub_(gradient.mul_(self._lr))
            _take_over(fragment, self._mixing)
            return
        fragment.velocity.mul_(self._momentum).add_(gradient)
        ahead = fragment.velocity * self._momentum
        fragment.outer.sub_(ahead.add_(gradient).mul_(self._lr))
        _take_over(fragment, self._mixing)


def _take_over(fragment: _Fragment, mixing: float) -> None:
    """The model's parameters become the outer ones, but for a share of *mixing* of their own."""
    with torch.no_grad():
        for parameter, where in fragment.spread():
            outer = fragment.outer[where].reshape(parameter.shape).to(parameter.device, parameter.dtype)
            if mixing:
                parameter.mul_(mixing).add_(outer, alpha=1.0 - mixing)
            else:
                parameter.copy_(outer)


def _trained(parameters: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Those that need a gradient; of a DTensor this rank's part, and how it is spread."""
    module = isinstance(parameters, torch.nn.Module) or not isinstance(parameters, Iterable)
    given = [parameters] if module else list(parameters)
    for each in given:
        if not isinstance(each, torch.Tensor):
            raise ConfigError(
                "these are no parameters", who="DiLoCo(parameters)", expected="model.parameters()", got=kind_of(each)
            )
    given = [each for each in given if each.requires_grad]
    trained = [local_part(each.detach()) if hasattr(each, "to_local") else each for each in given]
    for each in trained:
        check_plain(each, "DiLoCo(parameters)")
    return trained, [spread_of(each) for each in given]


def _settings(values: Iterable[float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in zip(_ALIKE, values, strict=True))


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of it: float32, flat, on the CPU."""
    return parameter.detach().reshape(-1).to("cpu", torch.float32, copy=True)


def _check(
    parameters: list[torch.Tensor], every: int, fragments: int, delay: int, shares: dict[str, Any], lr: Any
) -> None:
    """Refuse what cannot be used."""
    wrong = [str(each.dtype) for each in parameters if not each.is_floating_point()]
    if not parameters or wrong:
        raise ConfigError(
            "these parameters cannot be trained", who="DiLoCo(parameters)",
            expected="floating parameters that need gradients", got=", ".join(wrong) or "none",
        )  # fmt: skip
    bounds = {
        "every": (every, 1, 1 << 31),
        "fragments": (fragments, 1, min(len(parameters), most_fragments(max(1, whole(every)), whole(delay)))),
        "delay": (delay, 0, whole(every) - 1),
    }
    for name, (value, least, most) in bounds.items():
        whole_number("DiLoCo", name, value, least, most)
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise refused("DiLoCo", name, share, "a number from 0 to below 1")
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr < float("inf"):
        raise refused("DiLoCo", "lr", lr, "a number above 0")

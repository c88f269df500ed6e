"""The process group: torch's calls, in torch's ranks, as calls of a communicator.

A rank of torch is fixed; the ring order of wancoll is the master's. A member is named by its rank, and RingPlaces says
which place in the ring each rank has in one epoch: roots and sources are translated by it, and blocks where order
matters.

The world of torch is fixed, too: every call is made with on_failure="raise", and after a loss every further call raises
the same error, until the group is destroyed and made again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch._C._profiler import _RecordFunctionFast

from wancoll.client.communicator import Communicator, Labelled
from wancoll.client.connection import Connection, Parting
from wancoll.client.work import Work
from wancoll.collective import Descriptor, Kind, Receipt, shortened
from wancoll.errors import ConfigError, OperationAborted, WancollError
from wancoll.torch.backend.anysource import FromAny, Mailbox
from wancoll.torch.backend.buckets import handed_over, move
from wancoll.torch.backend.handle import Completer, Operation
from wancoll.torch.backend.reconfigure import Reconfigurable
from wancoll.torch.backend.rendezvous import Cluster, member
from wancoll.torch.backend.sparse import Pieces
from wancoll.torch.backend.torch_errors import raised
from wancoll.torch.backend.torch_tensors import Reduction, flat, label, moved, parts, put_back
from wancoll.torch.backend.untraced import untraced
from wancoll.torch.names import BACKEND, DEVICES
from wancoll.wire import messages as m

_BEGIN_ANEW = "destroy_process_group(), and init_process_group() with those that are left"
_OWN_TAGS = 1 << 62  # from here on tags are ours, not the user's


def create(given: Any, options: Any) -> WancollProcessGroup:
    """What torch calls in init_process_group() and new_group(), on the ranks of the group, with its backend options."""
    if options is not None:
        raise ConfigError(
            "there are no options", who="init_process_group(pg_options=...)", expected="None",
            got=type(options).__name__,
        )  # fmt: skip
    _refuse_a_mix()
    timeout = given.timeout.total_seconds()
    first: Any = dist.group.WORLD if given.global_ranks_in_group else None
    world = first if isinstance(first, WancollProcessGroup) else None
    later = bool(getattr(given, "enable_reconfigure", False)) and first is None
    return WancollProcessGroup(given.store, given.group_rank, given.group_size, timeout, given.group_id, world, later)


def _refuse_a_mix() -> None:
    """Torch takes a Python process group for the whole of "cpu:...,cuda:..." and drops the other backend unsaid.

    Its caller, and nothing that it passes, knows what was asked for.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = frame.f_locals.get("backend_config") if frame is not None else None
    asked = config.get_device_backend_map() if config is not None else {}
    if len(set(asked.values())) > 1:
        raise ConfigError(
            "cannot share a process group with another backend", who="init_process_group(backend=...)",
            expected=f'"{BACKEND}" alone, for tensors of {" and ".join(DEVICES)}',
            got=",".join(f"{device}:{name}" for device, name in asked.items()),
            hint=f'or one group each: new_group(backend="{BACKEND}") beside the default one',
        )  # fmt: skip


class RingPlaces:
    """Where the ranks are in one epoch: the rank at each place of the ring (*order*), and each rank's place (*at*).

    *straight*: they are the same.
    """

    def __init__(self, connection: Connection, place: m.EpochInfo, size: int) -> None:
        self.place = place
        self._connection = connection
        where = {name: position for position, name in enumerate(place.members)}
        self.lost = [rank for rank in range(size) if member(rank) not in where]
        self.at = [where.get(member(rank), -1) for rank in range(size)]
        self.order = sorted(range(size), key=self.at.__getitem__)
        self.straight = self.order == list(range(size))

    def comm(self, label: str, *, ahead: bool = False) -> Communicator:
        """Makes calls by the ranks of this epoch, whatever comes meanwhile; all ranks must label a call alike.

        Its calls are checked and not posted: see post(). A recv that is called *ahead* is passed by by sends that do
        not fit it.
        """
        return Communicator(cast("Connection", _Held(self._connection, self.place, label, ahead)))

    def barrier(self, label: str = "") -> Work:
        """A barrier, not posted."""
        call = Descriptor(Kind.barrier, on_failure="raise", label=label)
        return Work(self._connection, call, self.place.epoch)

    def post(self, parts: Sequence[Work]) -> None:
        """Post the parts of one call, all or none where that can be known before.

        What only shows in the middle (no room, a device that fails) ends the rest of the parts on all ranks: in place
        of each this one calls a barrier that says why.
        """
        if len(parts) > 1:
            self._check(parts)
        for number, part in enumerate(parts):
            try:
                if not part.id:  # a receive from any rank has posted some already
                    self._connection.post(part)
            except BaseException as bad:
                if number:
                    self._spoil(parts[number:], f"given up: {bad}")
                raise

    def _check(self, parts: Sequence[Work]) -> None:
        placed = [(part.placement, part.descriptor) for part in parts if part.placement is not None and not part.id]
        for number, (placement, descriptor) in enumerate(placed):
            self._connection.check_free(placement, descriptor)
            for earlier, other in placed[:number]:
                if placement.conflicts(earlier):
                    raise ConfigError(
                        "two tensors of one call share memory", expected="tensors that lie apart",
                        got=f"{other} and {descriptor}",
                    )  # fmt: skip

    def _spoil(self, parts: Sequence[Work], why: str) -> None:
        for part in parts:
            if part.descriptor.kind not in (Kind.send, Kind.recv):  # these have no place in the order of calls
                with contextlib.suppress(WancollError):
                    self._connection.post(self.barrier(shortened(why)))


class _Held(Labelled):
    """A connection whose place in the group stays what it was, and whose calls are labelled, and posted later."""

    def __init__(self, connection: Connection, place: m.EpochInfo, label: str, ahead: bool) -> None:
        super().__init__(connection, label)
        self.place, self.ahead = place, ahead

    def post(self, work: Work, deadline: float | None = None) -> None:
        """Nothing: whoever made it does that."""


_ProcessGroup: Any = dist.ProcessGroup  # its overloads cannot be said again in Python


@untraced
class WancollProcessGroup(Reconfigurable, _ProcessGroup):  # type: ignore[misc]
    """One group of torch's, over wancoll. Made by init_process_group("wancoll") and new_group().

    *timeout* seconds is what joining, and then each operation, may take. A group shares the *cluster*, this process's
    daemon and master, of the default group *world*; None: this is it, or that is of another backend. *later*: there is
    no world, and no cluster, yet: reconfigure() makes the first one.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, name: str,
        world: WancollProcessGroup | None = None, later: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(rank, size)  # with a store it makes no Python object
        self._store = store
        self._rank, self._size, self._timeout = rank, size, timeout
        self._name, self._description = name, ""
        self._coalesced: list[Operation] | None = None
        self._placing = threading.Lock()
        self._gone: WancollError | None = None  # why no call can be made any more
        self._world, self._owner = world, world is None
        self._comm: Communicator | None = None
        self.cluster: Cluster | None = None
        if later:
            self._gone = ConfigError(
                "the group has no world yet", who="init_process_group(enable_reconfigure=True)",
                expected="reconfigure() first",
            )  # fmt: skip
            return
        try:
            if world is None:
                self.cluster = Cluster(store, rank, size, timeout)
            self._join()
        except BaseException:
            self._leave(wait=False)
            raise

    def _join(self) -> None:
        look = None
        if self._world is not None:
            look = self._world._look
            look()
            self.cluster = self._world.cluster
        assert self.cluster is not None
        self._comm = self.cluster.join(self._name, self._rank, self._size, self._timeout, look)
        if self._owner:
            self.cluster.met()
        self._group = self._comm.group
        self._connection = self._comm._connection
        self.cluster.connections.append(self._connection)
        self._completer = Completer(self._connection)
        self._places = RingPlaces(self._connection, self._connection.place, self._size)
        self._called = 0  # operations of all ranks: the same number on each
        self._mailbox = Mailbox([rank for rank in range(self._size) if rank != self._rank])

    def _leave(self, *, wait: bool) -> None:
        """Pending operations fail. Of the default group: end this process's daemon, too."""
        if self._comm is not None:
            self._comm.close()
            self._completer.close()
            if self.cluster is not None and self._connection in self.cluster.connections:
                self.cluster.connections.remove(self._connection)
        if self._owner and self.cluster is not None:
            self.cluster.close(wait=wait)
            self.cluster = None

    def _finished(self, call: str) -> Operation:
        return Operation(call, [], None, self._completer, lambda bad: bad, lambda _receipts: None, [])

    # ---- what torch asks of a group ------------------------------------------------------------------

    def name(self) -> str:
        """The backend's."""
        return BACKEND

    getBackendName = _get_backend_name = name

    def getRank(self) -> int:
        """This process's rank."""
        return self._rank

    def getSize(self) -> int:
        """How many ranks there are."""
        return self._size

    rank = getRank
    size = getSize

    def getGroupName(self) -> str:
        """Its name, as torch made it."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Torch says it again when the group is made."""
        self._name = name

    def getGroupDesc(self) -> str:
        """What the group is for, in torch's words."""
        return self._description

    def setGroupDesc(self, text: str) -> None:
        """Torch says what the group is for."""
        self._description = text

    def get_group_store(self) -> Store:
        """The store of torch, of this group alone."""
        return self._store

    @property
    def supports_coalescing(self) -> bool:
        """Whether sends and receives must be bracketed."""
        return False

    @property
    def supports_splitting(self) -> bool:
        """Whether a group can be made out of this one without torch's store."""
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in DEVICES[: 1 + torch.cuda.is_available()]]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    # Torch's C++ finds no name of a group that has no backend below it; Python asks by these.
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of every later operation that names none itself."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group: pending operations fail. Of the default group: end this process's daemon, too."""
        self._gone = OperationAborted("the group was shut down", who=f"group {self._name!r}")
        # With rank 0 torch's store has died, and the other ranks need not be told of this one's end.
        first = self._connection.partings.get(member(0)) if self._comm is not None else None
        self._leave(wait=first is None or not first.lost)

    # ---- making a call -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Raise if no group can be made any more. Who left in peace may be no member of the new one."""
        try:
            self._places_now("new_group", None)
        except OperationAborted:
            partings = self._partings()
            if self.cluster is None or not partings or any(parting.lost for parting in partings):
                raise

    def _places_now(self, call: str, other: int | None) -> RingPlaces:
        """The current epoch's, if nobody is lost; where a pair talks, if *other* is not: ranks may end one by one."""
        with self._placing:
            if self._gone is None:
                self._connection.wait_any([], 0)  # a loss that is known here is seen before the call is made
                place = self._connection.place
                if self._places.place is not place:
                    self._places = RingPlaces(self._connection, place, self._size)
                if self._places.lost and (other is None or other in self._places.lost):
                    self._gone = self._loss(f"group {self._group!r}: {'; '.join(self._reasons())}")
            if self._gone is not None:
                raise raised(self._gone, call)
            return self._places

    def _partings(self) -> list[Parting]:
        """In the order of events: some are lost, others leave when they hear of that."""
        return list(self._connection.partings.values()) if self._comm is not None else []

    def _reasons(self) -> list[str]:
        """Reasons of the partings, in the master's words."""
        return list(dict.fromkeys(parting.reason for parting in self._partings()))

    def _loss(self, what: str) -> OperationAborted:
        return OperationAborted(what, who=member(self._rank), expected=f"all {self._size} ranks", hint=_BEGIN_ANEW)

    def _explain(self, call: str, bad: WancollError) -> Exception:
        self._note(bad)
        if isinstance(bad, OperationAborted) and _BEGIN_ANEW not in bad.hint:
            bad.hint = "; ".join(filter(None, (bad.hint, _BEGIN_ANEW)))
        return raised(bad, call, "; ".join(text for text in self._reasons() if text not in str(bad)))

    def _run(
        self, call: str, given: Sequence[torch.Tensor], result: Sequence[torch.Tensor], timeout: Any,
        start: Callable[[RingPlaces], list[Work]], finish: Callable[[list[Receipt]], None] | None = None,
        other: int | None = None, pairs: bool = False,
    ) -> Operation:  # fmt: skip
        """Make an operation: *start* makes its calls, *finish* brings their results to where they belong.

        It is between this rank and *other*, or between *pairs*, or of all ranks.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else -1.0
        deadline = time.monotonic() + (seconds if seconds > 0 else self._timeout)

        def check(receipts: list[Receipt]) -> None:
            if self.cluster is not None:
                self.cluster.bytes_sent += sum(receipt.bytes_sent for receipt in receipts)
            for receipt in receipts:
                if receipt.world_size != self._size and other is None and not pairs:
                    raise OperationAborted("was committed without all ranks", who=f"group {self._group!r}",
                        expected=f"all {self._size} ranks", got=", ".join(receipt.contributors))  # fmt: skip
            if finish is not None:
                finish(receipts)

        parts: list[Work] = []
        with _range(call, given):
            try:
                places = self._places_now(call, other)
                parts = start(places)
                places.post(parts)
            except WancollError as bad:
                raise self._explain(call, bad) from bad
            finally:
                if other is None and any(part.id for part in parts):  # also if half of it was posted
                    self._called += 1
        explain = partial(self._explain, call)
        operation = Operation(call, parts, deadline, self._completer, explain, check, list(result))
        if self._coalesced is not None:
            self._coalesced.append(operation)
        return operation

    # ---- everyone gets the same ----------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Reduce in place. What torch's reducer hands over moves into the arena."""
        moves, tensors = handed_over(sys._getframe().f_back), _listed(tensors)
        operation = self._all_reduce("all_reduce", tensors, opts, timeout, moves=moves)
        if moves:
            operation.raise_in_backward()
        # It may be torch's hook FP16_COMPRESS that asks.
        operation.for_cpp = moves and all(each.dtype is torch.float16 and each.is_cpu for each in tensors)
        return operation

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Operation:
        """Reduce many in place."""
        return self._all_reduce("all_reduce_coalesced", _listed(tensors), opts, None)

    def _all_reduce(
        self, call: str, tensors: list[torch.Tensor], opts: Any, timeout: Any, *, moves: bool = False
    ) -> Operation:
        if len(tensors) == 1 and tensors[0].is_sparse:
            return self._all_reduce_sparse(call, tensors[0], opts, timeout)
        own, spread = parts(tensors)
        how = [Reduction(_op(opts), each.dtype, call, of) for each, of in zip(own, spread, strict=True)]
        given = [each.given(tensor, call) for each, tensor in zip(how, own, strict=True)]

        def start(places: RingPlaces) -> list[Work]:
            others = self.cluster.connections if self.cluster is not None else ()
            for x in given if moves else ():
                move(x, self._connection, others)
            return [
                places.comm(each.label).all_reduce(x, op=each.name, async_op=True, on_failure="raise")
                if each.bitwise is None
                else places.comm(each.label).all_gather(x, async_op=True, on_failure="raise")
                for each, x in zip(how, given, strict=True)
            ]

        finish = partial(self._reduced, how, own, given)
        return self._run(call, own, tensors, _timeout(opts, timeout), start, finish)

    def _all_reduce_sparse(self, call: str, tensor: torch.Tensor, opts: Any, timeout: Any) -> Operation:
        """Blocks until all have said how much they bring."""
        pieces = Pieces(tensor, _op(opts), call)
        headers = [torch.empty_like(pieces.header) for _ in range(self._size)]
        self._all_gather(call, [headers], [pieces.header], opts, timeout, of="sparse").wait()
        room = pieces.room(headers)
        into = [tensor], partial(pieces.put, room)
        return self._all_gather(call, room, pieces.parts, opts, timeout, into, of="sparse")

    def _reduced(
        self, how: list[Reduction], targets: list[torch.Tensor], given: list[torch.Tensor], receipts: list[Receipt]
    ) -> None:
        """Bring results to their targets: reduced in place in what was given, or, of bitwise ops, to be folded."""
        for each, target, x, receipt in zip(how, targets, given, receipts, strict=True):
            put_back(target, x if each.bitwise is None else each.fold(receipt.out.view(self._size, -1)))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Give every rank the root's tensor."""
        tensors = _listed(tensors)
        root = _root(opts)
        own, spread = parts(tensors)
        given = [moved(each, "broadcast") for each in own]

        def start(places: RingPlaces) -> list[Work]:
            return [
                places.comm(label(each.dtype, of)).broadcast(x, places.at[root], async_op=True, on_failure="raise")
                for each, of, x in zip(own, spread, given, strict=True)
            ]

        finish = None if root == self._rank else partial(_put_back, own, given)
        return self._run("broadcast", own, tensors, _timeout(opts, timeout), start, finish)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Operation:
        """Finished when all ranks have called it."""
        return self._run("barrier", [], [], _timeout(opts, timeout), lambda places: [places.barrier()])

    # ---- blocks --------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Give every rank the tensors of all; their sizes may differ."""
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs = [outputs]
        return self._all_gather("all_gather", outputs, _listed(inputs), opts, timeout)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Operation:
        """Do allgather() of many: output_lists has a list for each rank."""
        outputs = [list(each) for each in zip(*output_lists, strict=True)]
        return self._all_gather("all_gather_coalesced", outputs, list(input_list), opts, None)

    def _all_gather(
        self,
        call: str,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
        timeout: Any,
        into: tuple[list[torch.Tensor], Callable[[], None]] | None = None,
        of: str = "",
    ) -> Operation:
        """The result is *outputs*, or the tensors that the function of *into* makes of them; all ranks say *of*."""
        self._check_blocks(call, outputs, len(inputs))
        given = [moved(each, call) for each in inputs]
        counts: list[list[int]] = []
        for x, tensor, blocks in zip(given, inputs, outputs, strict=True):
            if blocks[self._rank].numel() != tensor.numel() or any(each.dtype != tensor.dtype for each in blocks):
                raise self._refused(
                    call, "the output does not fit the input",
                    f"a tensor of {tensor.numel()} elements of {tensor.dtype} at this rank",
                    f"{blocks[self._rank].numel()} of {blocks[self._rank].dtype}",
                )  # fmt: skip
            scale = tensor.element_size() // x.element_size()
            counts.append([each.numel() * scale for each in blocks])

        def start(places: RingPlaces) -> list[Work]:
            return [
                places.comm(" ".join(filter(None, (of, label(tensor.dtype))))).all_gather(
                    x, counts=None if len(set(each)) == 1 else [each[rank] for rank in places.order],
                    async_op=True, on_failure="raise",
                )
                for x, tensor, each in zip(given, inputs, counts, strict=True)
            ]  # fmt: skip

        def finish(receipts: list[Receipt]) -> None:
            for receipt, blocks, each in zip(receipts, outputs, counts, strict=True):
                order = self._order(receipt)
                parts = receipt.out.view(-1).split([each[rank] for rank in order])
                for rank, part in zip(order, parts, strict=True):
                    put_back(blocks[rank], part)
            if into is not None:
                into[1]()

        result = into[0] if into is not None else [each for blocks in outputs for each in blocks]
        return self._run(call, inputs, result, _timeout(opts, timeout), start, finish)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Do allgather() into one tensor."""
        return self._all_gather_single("all_gather_single", [output], [input], opts, timeout)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Operation:
        """Do all_gather_single() of many."""
        return self._all_gather_single("all_gather_single_coalesced", list(outputs), list(inputs), opts, None)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(
        self, call: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any, timeout: Any
    ) -> Operation:
        given = [moved(each, call) for each in inputs]
        taken = [moved(each, call) for each in outputs]
        for i, (x, y) in enumerate(zip(given, taken, strict=True)):
            self._check_stack(call, x, y, "output", "input")
            if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
                given[i] = x.clone()  # FSDP passes the place in the output where it belongs

        def start(places: RingPlaces) -> list[Work]:
            return [
                places.comm(label(each.dtype)).all_gather(
                    x, y if places.straight else None, async_op=True, on_failure="raise"
                )
                for each, x, y in zip(inputs, given, taken, strict=True)
            ]

        def finish(receipts: list[Receipt]) -> None:
            for receipt, target, y in zip(receipts, outputs, taken, strict=True):
                at = self._at(receipt)  # of the epoch that committed it
                if at != list(range(self._size)):
                    blocks = receipt.out.view(self._size, -1)
                    put_back(target, torch.index_select(blocks, 0, torch.tensor(at, device=y.device)).view(-1))
                else:
                    put_back(target, receipt.out.view(-1))

        return self._run(call, inputs, outputs, _timeout(opts, timeout), start, finish)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Reduce; every rank gets its block. The blocks' sizes may differ."""
        outputs = _listed(outputs)
        if inputs and isinstance(inputs[0], torch.Tensor):
            inputs = [inputs]
        self._check_blocks("reduce_scatter", inputs, len(outputs))
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts, timeout)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Do reduce_scatter() of one tensor."""
        return self._reduce_scatter_single("reduce_scatter_single", [output], [input], opts, timeout)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Operation:
        """Do reduce_scatter_single() of many."""
        return self._reduce_scatter_single("reduce_scatter_single_coalesced", list(outputs), list(inputs), opts, None)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_single(
        self, call: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any, timeout: Any
    ) -> Operation:
        for y, x in zip(outputs, inputs, strict=True):
            self._check_stack(call, y, x, "input", "output")
        blocks = [flat(each, call).view(self._size, -1).unbind() for each in inputs]
        return self._reduce_scatter(call, outputs, blocks, opts, timeout, inputs)

    def _reduce_scatter(
        self, call: str, outputs: list[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any, timeout: Any,
        whole: list[torch.Tensor] | None = None,
    ) -> Operation:  # fmt: skip
        """Reduce and scatter blocks by rank; *whole*: the tensors that have them in one piece."""
        how = [Reduction(_op(opts), each.dtype, call) for each in outputs]
        targets = [flat(each, call) for each in outputs]
        counts = [[block.numel() for block in blocks] for blocks in inputs]
        for target, each in zip(targets, counts, strict=True):
            if target.numel() != each[self._rank]:
                expected = f"{each[self._rank]} elements"
                raise self._refused(call, "the output does not fit the input", expected, str(target.numel()))

        def start(places: RingPlaces) -> list[Work]:
            works: list[Work] = []
            for number, (each, blocks, sizes) in enumerate(zip(how, inputs, counts, strict=True)):
                # All blocks of a bitwise op go to all ranks: so in the order of ranks, whatever the epoch.
                order = places.order if each.bitwise is None else range(self._size)
                if whole is not None and (places.straight or each.bitwise is not None):
                    x = each.given(whole[number], call)
                else:
                    x = torch.cat([each.given(blocks[rank], call) for rank in order])
                if each.bitwise is not None:
                    cuts = "" if len(set(sizes)) == 1 else f", cut to {sizes}"
                    comm = places.comm(shortened(each.label + cuts))
                    works.append(comm.all_gather(x, async_op=True, on_failure="raise"))
                    continue
                scale = x.numel() // (sum(sizes) or 1)
                uneven = None if len(set(sizes)) == 1 else [sizes[rank] * scale for rank in places.order]
                works.append(places.comm(each.label).reduce_scatter(
                    x, op=each.name, counts=uneven, async_op=True, on_failure="raise"
                ))  # fmt: skip
            return works

        def finish(receipts: list[Receipt]) -> None:
            for receipt, each, target, sizes in zip(receipts, how, outputs, counts, strict=True):
                if each.bitwise is None:
                    put_back(target, receipt.out.view(-1))
                else:
                    parts = receipt.out.view(self._size, -1)
                    scale = parts.shape[1] // (sum(sizes) or 1)
                    begin = sum(sizes[: self._rank]) * scale
                    put_back(target, each.fold(parts[:, begin : begin + sizes[self._rank] * scale]))

        given = [block for blocks in inputs for block in blocks]
        return self._run(call, given, outputs, _timeout(opts, timeout), start, finish)

    def alltoall_base(
        self, output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None,
        timeout: Any = None,
    ) -> Operation:  # fmt: skip
        """Block j of rank i becomes block i of rank j; blocks are rows of the first dimension."""
        call = "all_to_all_single"
        return self._exchange(
            call, self._rows(call, output, output_split_sizes), self._rows(call, input, input_split_sizes), output,
            opts, timeout,
        )  # fmt: skip

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Do alltoall_base() of lists of tensors of any sizes."""
        return self._exchange("all_to_all", list(outputs), list(inputs), None, opts, timeout)

    def _rows(self, call: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The tensor cut by *sizes* of its first dimension; all equal where there are none."""
        rows = tensor.shape[0] if tensor.dim() else 0
        cut = list(sizes) or [rows // self._size] * self._size
        if len(cut) != self._size or sum(cut) != rows:
            expected = f"{self._size} sizes that add up to {rows}"
            raise self._refused(call, "the split sizes do not fit the tensor", expected, str(cut))
        return list(torch.split(tensor.detach(), cut))

    def _exchange(
        self, call: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], whole: torch.Tensor | None, opts: Any,
        timeout: Any,
    ) -> Operation:  # fmt: skip
        """Between each two ranks by themselves: no rank knows the sizes of two others.

        A barrier goes with it, and decides: who does not exchange is known by name. What was posted then stays, so tags
        are used once.
        """
        given = [moved(each, call) for each in inputs]
        taken = [moved(each, call) for each in outputs]
        self._check_blocks(call, [outputs, inputs], 2)
        self._check_fit(call, outputs[self._rank], inputs[self._rank])
        written = {each.untyped_storage().data_ptr() for each in taken}
        given = [each.clone() if each.untyped_storage().data_ptr() in written else each for each in given]
        others = [rank for rank in range(self._size) if rank != self._rank]
        tag = _OWN_TAGS + self._called

        def start(places: RingPlaces) -> list[Work]:
            return [
                *(places.comm(label(outputs[each].dtype)).recv(taken[each], places.at[each], tag, async_op=True)
                  for each in others),
                *(places.comm(label(inputs[each].dtype)).send(given[each], places.at[each], tag, async_op=True)
                  for each in others),
                places.barrier("all_to_all"),
            ]  # fmt: skip

        def finish(receipts: list[Receipt]) -> None:
            taken[self._rank].copy_(given[self._rank])
            _put_back(outputs, taken, receipts)

        result = outputs if whole is None else [whole]
        operation = self._run(call, inputs, result, _timeout(opts, timeout), start, finish, pairs=True)
        operation.led = True
        return operation

    # ---- with a root ---------------------------------------------------------------------------------

    def reduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Reduce; the root gets the result in place."""
        tensors = _listed(tensors)
        root, call = _root(opts), "reduce"
        here = root == self._rank
        own, spread = parts(tensors)
        how = [Reduction(_op(opts), each.dtype, call, of) for each, of in zip(own, spread, strict=True)]
        given = [each.given(tensor, call) for each, tensor in zip(how, own, strict=True)]

        def start(places: RingPlaces) -> list[Work]:
            return [
                places.comm(each.label).reduce(
                    x, x if here else None, places.at[root], op=each.name, async_op=True, on_failure="raise"
                )
                if each.bitwise is None
                else places.comm(each.label).gather(x, root=places.at[root], async_op=True, on_failure="raise")
                for each, x in zip(how, given, strict=True)
            ]  # fmt: skip

        finish = partial(self._reduced, how, own, given) if here else None
        return self._run(call, own, tensors, _timeout(opts, timeout), start, finish)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Give the root the tensors of all."""
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs = [outputs]
        inputs, root = _listed(inputs), _root(opts)
        given = [moved(each, "gather") for each in inputs]
        here = root == self._rank
        if here:
            self._check_blocks("gather", outputs, len(inputs))
            for blocks, x in zip(outputs, inputs, strict=True):
                self._check_fit("gather", x, *blocks)

        def start(places: RingPlaces) -> list[Work]:
            return [
                places.comm(label(each.dtype)).gather(x, root=places.at[root], async_op=True, on_failure="raise")
                for each, x in zip(inputs, given, strict=True)
            ]

        def finish(receipts: list[Receipt]) -> None:
            for receipt, blocks in zip(receipts, outputs, strict=True) if here else ():
                for rank, part in zip(self._order(receipt), receipt.out.view(self._size, -1), strict=True):
                    put_back(blocks[rank], part)

        result = [each for blocks in outputs for each in blocks] if here else []
        return self._run("gather", inputs, result, _timeout(opts, timeout), start, finish)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Operation:
        """Give every rank its block of the root's."""
        outputs, root = _listed(outputs), _root(opts)
        if inputs and isinstance(inputs[0], torch.Tensor):
            inputs = [inputs]
        taken = [moved(each, "scatter") for each in outputs]
        here = root == self._rank
        if here:
            self._check_blocks("scatter", inputs, len(outputs))
            for blocks, y in zip(inputs, outputs, strict=True):
                self._check_fit("scatter", y, *blocks)

        def start(places: RingPlaces) -> list[Work]:
            blocks = [torch.cat([moved(each[rank], "scatter") for rank in places.order]) for each in inputs if here]
            return [
                places.comm(label(outputs[i].dtype)).scatter(
                    blocks[i] if here else None, y, places.at[root], async_op=True, on_failure="raise"
                )
                for i, y in enumerate(taken)
            ]

        finish = partial(_put_back, outputs, taken)
        given = [each for blocks in inputs for each in blocks] if here else []
        return self._run("scatter", given, outputs, _timeout(opts, timeout), start, finish)

    # ---- one rank to another -------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Operation:
        """Finished when the other rank has it."""
        (tensor,) = _listed(tensors)
        given = moved(tensor, "send")
        self._check_other("send", dst, tag)

        def start(places: RingPlaces) -> list[Work]:
            return [places.comm(label(tensor.dtype)).send(given, places.at[dst], tag, async_op=True)]

        return self._run("send", [tensor], [tensor], None, start, other=dst)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Operation:
        """Take what the other rank sends with this tag."""
        (tensor,) = _listed(tensors)
        taken = moved(tensor, "recv")
        self._check_other("recv", src, tag)
        early = self._mailbox.take(src, tag, tensor)

        def start(places: RingPlaces) -> list[Work]:
            if early is not None:
                return [early.work]
            return [places.comm(label(tensor.dtype)).recv(taken, places.at[src], tag, async_op=True)]

        def finish(_receipts: list[Receipt]) -> None:
            put_back(tensor, early.x if early else taken)

        operation = self._run("recv", [tensor], [tensor], None, start, finish, other=src)
        operation.source = src
        return operation

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Operation:
        """Take what any other rank sends with this tag; source_rank() says which it was."""
        (tensor,) = _listed(tensors)
        call = "recv_anysource"
        with _range(call, [tensor]):
            self._places_now(call, None)
            return FromAny(
                self._mailbox, tensor, tag, partial(self._receive, label(tensor.dtype)), name=call,
                deadline=time.monotonic() + self._timeout,
                completer=self._completer, explain=partial(self._explain, call),
            )  # fmt: skip

    def _receive(self, label: str, source: int, tag: int, x: torch.Tensor) -> Work:
        places = self._places_now("recv_anysource", source)
        part = places.comm(label, ahead=True).recv(x, places.at[source], tag, async_op=True)
        places.post([part])
        return part

    def _check_other(self, call: str, other: int, tag: int) -> None:
        if not 0 <= other < self._size or other == self._rank or not 0 <= tag < _OWN_TAGS:
            expected = f"another rank, 0 to {self._size - 1}, and a tag from 0 to 2^62 - 1"
            raise self._refused(call, "cannot be", expected, f"rank {other}, tag {tag}; this is rank {self._rank}")

    # ---- several as one ------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        operations, self._coalesced = self._coalesced or [], None
        return Together(operations)

    # ---- blocks and ranks ----------------------------------------------------------------------------

    def _order(self, receipt: Receipt) -> list[int]:
        """The rank of each block of a result."""
        return [int(name.rpartition("-")[2]) for name in receipt.contributors]

    def _at(self, receipt: Receipt) -> list[int]:
        """The block of each rank in a result."""
        order = self._order(receipt)
        return sorted(range(self._size), key=order.__getitem__)

    def _check_blocks(self, call: str, lists: Sequence[Sequence[torch.Tensor]], count: int) -> None:
        if len(lists) != count or any(len(each) != self._size for each in lists):
            got = str([len(each) for each in lists])
            raise self._refused(call, "the lists do not fit the group", f"{count} lists of {self._size} tensors", got)

    def _check_fit(self, call: str, like: torch.Tensor, *blocks: torch.Tensor) -> None:
        for each in blocks:
            if each.numel() != like.numel() or each.dtype != like.dtype:
                expected = f"{like.numel()} elements of {like.dtype}"
                raise self._refused(call, "the tensors do not fit", expected, f"{each.numel()} of {each.dtype}")

    def _check_stack(self, call: str, part: torch.Tensor, whole: torch.Tensor, larger: str, smaller: str) -> None:
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            expected = f"{part.numel() * self._size} elements of {part.dtype}"
            got = f"{whole.numel()} of {whole.dtype}"
            raise self._refused(call, f"the {larger} does not fit the {smaller}", expected, got)

    def _refused(self, call: str, what: str, expected: str, got: str) -> WancollError:
        return raised(ConfigError(what, who=f"group {self._group!r}", expected=expected, got=got), call)


@untraced
class Together(dist.Work):
    """Several operations as one."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until all have ended; the first error is raised."""
        return all(each.wait(timeout) for each in self._operations)

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(each.is_completed() for each in self._operations)

    def get_future(self) -> Any:
        """Complete when all are."""
        return torch.futures.collect_all([each.get_future() for each in self._operations])


def _range(call: str, given: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """What torch's profiler shows."""
    return cast("AbstractContextManager[None]", _RecordFunctionFast(f"{BACKEND}:{call}", list(given)))


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _put_back(targets: Sequence[torch.Tensor], carried: Sequence[torch.Tensor], _: list[Receipt]) -> None:
    for target, x in zip(targets, carried, strict=True):
        put_back(target, x)


def _op(opts: Any) -> Any:
    """The reduce op, of options or as it was given."""
    return getattr(opts, "reduceOp", opts) if opts is not None else dist.ReduceOp.SUM


def _root(opts: Any) -> int:
    """The root, of options or as it was given."""
    return int(getattr(opts, "rootRank", opts) if opts is not None else 0)


def _timeout(opts: Any, timeout: Any) -> Any:
    if isinstance(opts, timedelta):
        return opts
    return timeout if timeout is not None else getattr(opts, "timeout", None)

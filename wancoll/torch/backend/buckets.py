"""Buckets of DistributedDataParallel move into the arena, so that nothing of them is copied.

torch's reducer keeps each bucket in a storage of its own for the whole training, and hands it over from C++ in the
middle of a backward. Nobody has a pointer to its memory: all tensors ask the storage. So the storage's memory can be
exchanged for a block of the arena, at the cost of the one copy that the call would make anyway. From then on the bucket
is an array of the arena, like one of Communicator.empty(): read where it lies, and the result appears by exchange of
pages. The storage holds the block as it held its own memory, until it is freed; it cannot be resized any more.

Other tensors stay where they are: somebody may have a pointer to their memory (tensor.numpy()), which would dangle.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import FrameType

import numpy as np
import torch

from wancoll.client.connection import Connection
from wancoll.client.memory.arena import SWAP_BYTES, size_class
from wancoll.client.memory.placement import overlap
from wancoll.client.memory.tensors import new_array
from wancoll.errors import ArenaFull

OPTION = "WANCOLL_MOVE_BUCKETS"  # 0: they stay
_MARK = "in_wancoll_arena"  # of a storage that was moved: it is not resizable any more, and may move to another arena
_EXCHANGE = "_swap_data_ptr_"  # torch's own name for it: where it is missing, buckets stay
_SHARE = 4  # buckets move while no more than this part of the arena is held: the rest is for what cannot move
_BACKWARD = "torch.autograd.graph"  # the last module in Python that torch's reducer is called through


def handed_over(caller: FrameType | None) -> bool:
    """Whether torch's reducer called, from C++ in the middle of a backward, and not *caller*, some code in Python."""
    return caller is None or caller.f_globals.get("__name__") == _BACKWARD


def move(bucket: torch.Tensor, connection: Connection, others: Iterable[Connection] = ()) -> bool:
    """Give the storage of *bucket*, which has it whole, memory in the connection's arena with the same bytes.

    Calls of *others* may use it, too. Returns False if it is too small to be worth it, there already, not torch's own
    memory, or in use by a pending call; or if more than a quarter of the arena would be held.
    """
    storage = bucket.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    own = bucket.device.type == "cpu" and (storage.resizable() or hasattr(storage, _MARK)) and not storage.is_shared()
    if nbytes < SWAP_BYTES or bucket.nbytes != nbytes or not own or os.environ.get(OPTION) == "0":
        return False
    arena, here = connection.arena, ((address, address + nbytes),)
    exchange = getattr(torch.UntypedStorage, _EXCHANGE, None)
    crowded = arena.leased_bytes + size_class(nbytes) > arena.nbytes // _SHARE
    if exchange is None or crowded or arena.find(address, nbytes) is not None:
        return False
    for work in (work for each in (connection, *others) for work in each.pending):
        placement = work.placement  # another thread may be finishing it
        if placement is not None and (overlap(here, placement.reads) or overlap(here, placement.writes)):
            return False  # its result goes to the old address
    try:
        found = torch.from_numpy(new_array(arena, (nbytes,), np.dtype(np.uint8)))
    except ArenaFull:
        return False
    found.copy_(bucket.detach().view(-1).view(torch.uint8))
    exchange(storage, found.untyped_storage())
    setattr(storage, _MARK, True)
    return True

"""Sparse tensors (torch's COO layout), whose places differ from rank to rank: gathered, then added by each rank.

First the ranks say how much each brings, then they bring it. A value that several bring is added up in the order of
the ranks, on every rank: so that all have the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from wancoll.errors import CollectiveMismatch, ConfigError
from wancoll.torch.backend.torch_errors import raised


class Pieces:
    """What this rank brings of a sparse_coo tensor, and how what all bring becomes the result, which replaces it.

    The *header*, int64 (2,), has how many places have a value here, and a digest of what must be alike on all ranks.
    The *parts* are the indices, int64 (sparse dimensions x places), and the values (places x dense dimensions). Raises
    ConfigError: the op is not SUM, or the layout is another.
    """

    def __init__(self, tensor: torch.Tensor, op: Any, call: str) -> None:
        kind = str(getattr(op, "op", op)).rpartition(".")[2]
        if tensor.layout is not torch.sparse_coo or kind != "SUM":
            raise raised(ConfigError(
                "there is no such reduction of a sparse tensor", expected="SUM, of torch.sparse_coo",
                got=f"{kind} of {tensor.layout}", hint="pass x.to_dense()",
            ), call)  # fmt: skip
        self._target, self._call = tensor, call
        mine = tensor.detach().coalesce()
        self.parts = [mine.indices(), mine.values()]
        self._alike = f"{tuple(mine.shape)} of {mine.dtype}, {mine.sparse_dim()} dimensions of them sparse"
        digest = hashlib.blake2b(f"sparse {self._alike}".encode(), digest_size=8).digest()
        self.header = torch.tensor([mine._nnz(), int.from_bytes(digest, signed=True)], device=mine.device)

    def room(self, headers: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Where to gather the parts of all: indices by rank, and values by rank.

        Raises CollectiveMismatch, on every rank: the ranks' tensors are not alike, or cannot be.
        """
        others = [rank for rank, each in enumerate(headers) if int(each[1]) != int(self.header[1])]
        if others:
            raise raised(CollectiveMismatch(
                "the ranks' sparse tensors are not alike", expected="one shape, dtype and number of sparse dimensions",
                got=f"here {self._alike}; another at rank {', '.join(map(str, others))}",
            ), self._call)  # fmt: skip
        indices, values = self.parts
        counts = [int(each[0]) for each in headers]
        most = math.prod(self._target.shape[: self._target.sparse_dim()])
        if wrong := {rank: count for rank, count in enumerate(counts) if not 0 <= count <= most}:
            raise raised(CollectiveMismatch(
                "a sparse tensor cannot have as many values", expected=f"0 to {most} places of {self._alike}",
                got=", ".join(f"{count} at rank {rank}" for rank, count in wrong.items()),
            ), self._call)  # fmt: skip
        return [
            [indices.new_empty((indices.shape[0], count)) for count in counts],
            [values.new_empty((count, *values.shape[1:])) for count in counts],
        ]

    def put(self, room: list[list[torch.Tensor]]) -> None:
        """Make the target what all brought. Raises CollectiveMismatch, on every rank: a place lies outside."""
        indices, values = room
        lengths = self._target.shape[: self._target.sparse_dim()]
        ends = torch.tensor(lengths, device=values[0].device)[:, None]
        if wrong := [rank for rank, each in enumerate(indices) if bool(((each < 0) | (each >= ends)).any())]:
            raise raised(CollectiveMismatch(
                "a sparse tensor has values outside of it", expected=f"places of {self._alike}",
                got=f"others at rank {', '.join(map(str, wrong))}",
            ), self._call)  # fmt: skip
        keys = torch.zeros(sum(each.shape[1] for each in indices), dtype=torch.int64, device=values[0].device)
        for length, row in zip(lengths, torch.cat(indices, 1), strict=True):
            keys = keys * length + row
        places, where = torch.unique(keys, return_inverse=True)  # sorted, as coalesce() sorts
        total = values[0].new_zeros((len(places), *values[0].shape[1:]))
        for at, each in zip(where.split([len(each) for each in values]), values, strict=True):
            total[at] += each  # a rank has each place once
        result = torch.sparse_coo_tensor(
            torch.stack(torch.unravel_index(places, lengths)), total, self._target.shape, is_coalesced=True,
            check_invariants=False,
        )  # fmt: skip
        with torch.no_grad():  # detach() would make another tensor, which can hold another number of places
            self._target.copy_(result)

"""torch tensors as the client takes them: contiguous and of its dtypes; others travel as copies or as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wancoll.client.memory.tensors import check_plain, local_part, spread_of
from wancoll.collective import shortened
from wancoll.errors import ConfigError
from wancoll.torch.backend.torch_errors import raised

KNOWN = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    }
)  # fmt: skip

BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_PLAIN = {"SUM": "sum", "AVG": "avg", "MIN": "min", "MAX": "max", "PRODUCT": "prod", "PREMUL_SUM": "sum"}
_OF_BOOL = {"SUM": "max", "MAX": "max", "PRODUCT": "min", "MIN": "min"}  # any, all
_OF_COMPLEX = ("SUM", "AVG", "PREMUL_SUM")  # what is done to the two parts each by itself


def flat(tensor: torch.Tensor, call: str) -> torch.Tensor:
    """*tensor* flat and contiguous, a view where it can be, else a copy. Raises ConfigError: it has no memory."""
    try:
        check_plain(tensor, "")
    except ConfigError as bad:
        raise raised(bad, call) from None
    found = tensor.detach()
    if found.is_conj() or found.is_neg():
        found = found.resolve_conj().resolve_neg()
    return found.reshape(-1).contiguous()  # with a step it would be a view


def moved(tensor: torch.Tensor, call: str) -> torch.Tensor:
    """Return flat(*tensor*) in a dtype that the client takes: other dtypes as their bytes."""
    found = flat(tensor, call)
    return found if found.dtype in KNOWN else found.view(torch.uint8)


def put_back(target: torch.Tensor, carried: torch.Tensor) -> None:
    """Make *target* what *carried*, a flat() or moved() of it, has become."""
    if carried.data_ptr() != target.data_ptr() or not target.is_contiguous():
        target.detach().copy_(carried.view(target.dtype).view(target.shape))


def label(dtype: torch.dtype, spread: str = "") -> str:
    """What moved() does not show: the dtype that travels as bytes, and *spread*, of which DTensor it is a part.

    All ranks must say the same of one call.
    """
    return shortened(f"{'' if dtype in KNOWN else dtype} {spread}".strip())


def parts(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[str]]:
    """The *tensors*, of DTensors this rank's parts, which share their memory, and how these are spread."""
    return [local_part(each.detach()) for each in tensors], [spread_of(each) for each in tensors]


class Reduction:
    """How a torch reduce op, with its factor where it has one, is done to tensors of one dtype.

    *name* is the client's op. For bitwise ops it is None, and *bitwise* joins two members' values. *label* is what the
    client's call does not show, torch's op and the dtype, and *spread* (see label()): all ranks must say the same of
    one call. Raises ConfigError: there is no such op for that dtype.
    """

    def __init__(self, op: Any, dtype: torch.dtype, call: str, spread: str = "") -> None:
        kind = str(getattr(op, "op", op)).rpartition(".")[2]
        # As torch pickles it: there is op.factor from 2.13 on.
        self._factor = op.__getstate__()[1] if kind == "PREMUL_SUM" else None
        self.bitwise = BITWISE.get(kind)
        self.name: Any = None
        if self.bitwise is not None:
            fits = not (dtype.is_floating_point or dtype.is_complex)
        elif dtype is torch.bool:
            self.name, fits = _OF_BOOL.get(kind), kind in _OF_BOOL
        elif dtype.is_complex:
            self.name, fits = _PLAIN.get(kind), kind in _OF_COMPLEX and dtype is not torch.complex32
        else:
            self.name, fits = _PLAIN.get(kind), kind in _PLAIN and dtype in KNOWN
        own = self.bitwise is None and self._factor is None and dtype in KNOWN
        self.label = "" if own else f"{call.removesuffix('_coalesced').removesuffix('_single')} {kind} of {dtype}"
        self.label = shortened(f"{self.label} {spread}".strip())
        if self._factor is not None and not (dtype.is_floating_point or dtype.is_complex):
            fits = False
        if not fits:
            raise raised(ConfigError(
                "there is no such reduction of this dtype",
                expected="SUM, AVG, MIN, MAX, PRODUCT, of floats PREMUL_SUM, of whole numbers BAND, BOR, BXOR; "
                "of bool no AVG; of complex SUM, AVG, PREMUL_SUM",
                got=f"{kind} of {dtype}", hint="convert the tensor first",
            ), call)  # fmt: skip

    def given(self, tensor: torch.Tensor, call: str) -> torch.Tensor:
        """What this member gives of *tensor*, flat, in a dtype that the client reduces."""
        found = flat(tensor, call)
        if self._factor is not None:
            factor = self._factor
            found = found * (factor.to(found.device, found.dtype) if isinstance(factor, torch.Tensor) else factor)
        if found.dtype is torch.bool:
            return found.view(torch.uint8)
        return torch.view_as_real(found).reshape(-1) if found.dtype.is_complex else found

    def fold(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result of a bitwise op, from what the members gave."""
        assert self.bitwise is not None
        result = blocks[0]
        for block in blocks[1:]:
            result = self.bitwise(result, block)
        return result

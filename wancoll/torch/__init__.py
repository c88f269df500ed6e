"""wancoll under PyTorch: `import wancoll.torch`, then `torch.distributed.init_process_group("wancoll")`.

Importing this registers the backend and no more: what it names is loaded at first use, since `import torch` itself
comes by here (the entry point in entry.py).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from wancoll.torch.entry import register, torch_is_loading

if TYPE_CHECKING:
    from wancoll.torch.backend.process_group import WancollProcessGroup
    from wancoll.torch.training.diloco import DiLoCo, OuterStep
    from wancoll.torch.training.elastic import ElasticDataParallel, StepReceipt, all_reduce_gradients
    from wancoll.torch.training.islands import islands
    from wancoll.torch.training.sampler import ElasticSampler

__all__ = [
    "DiLoCo",
    "ElasticDataParallel",
    "ElasticSampler",
    "OuterStep",
    "StepReceipt",
    "WancollProcessGroup",
    "all_reduce_gradients",
    "islands",
]

# Imported at first use.
_LAZY = {
    "DiLoCo": "wancoll.torch.training.diloco",
    "ElasticDataParallel": "wancoll.torch.training.elastic",
    "ElasticSampler": "wancoll.torch.training.sampler",
    "OuterStep": "wancoll.torch.training.diloco",
    "StepReceipt": "wancoll.torch.training.elastic",
    "WancollProcessGroup": "wancoll.torch.backend.process_group",
    "all_reduce_gradients": "wancoll.torch.training.elastic",
    "islands": "wancoll.torch.training.islands",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'wancoll.torch' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# An error here would be one of `import torch`.
with contextlib.suppress(Exception) if torch_is_loading() else contextlib.nullcontext():
    register()

"""wancoll under PyTorch. What it names is loaded at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wancoll.torch.diloco import DiLoCo, OuterStep
    from wancoll.torch.elastic import ElasticDataParallel, StepReceipt, all_reduce_gradients

__all__ = ["DiLoCo", "ElasticDataParallel", "OuterStep", "StepReceipt", "all_reduce_gradients"]

# Imported at first use.
_LAZY = {
    "DiLoCo": "wancoll.torch.diloco",
    "ElasticDataParallel": "wancoll.torch.elastic",
    "OuterStep": "wancoll.torch.diloco",
    "StepReceipt": "wancoll.torch.elastic",
    "all_reduce_gradients": "wancoll.torch.elastic",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'wancoll.torch' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

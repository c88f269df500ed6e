"""How torch learns of the backend: the entry point of group "torch.backends", which `import torch` calls.

It must never break, slow or fill `import torch`: nothing is imported here but what is loaded already.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from wancoll.torch.names import BACKEND, DEVICES


def autoload() -> None:
    """What `import torch` calls, at its end. Whatever goes wrong shows when the backend is asked for."""
    with contextlib.suppress(Exception):
        register()


def register() -> None:
    """Make init_process_group("wancoll") known. Again is harmless."""
    from torch.distributed import Backend, is_available

    if is_available() and BACKEND.upper() not in Backend._plugins:
        Backend.register_backend(BACKEND, _create, extended_api=True, devices=list(DEVICES))


def torch_is_loading() -> bool:
    """Whether this runs in the middle of `import torch`."""
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def _create(given: Any, options: Any) -> Any:
    from wancoll.torch.backend.process_group import create

    return create(given, options)

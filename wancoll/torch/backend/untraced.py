"""Keeps torch.compile out of our methods: C++ calls them while a compiled model runs, and it would trace them.

As torch.compiler.disable(), without the three seconds that its import takes where nobody compiles.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

T = TypeVar("T", bound=type[Any])


def untraced(kind: T) -> T:
    """A class whose methods run as they are, with all that they call."""
    skip = eval_frame._FrameAction.SKIP
    for value in vars(kind).values():
        if inspect.isfunction(value):
            eval_frame.set_code_exec_strategy(value.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return kind

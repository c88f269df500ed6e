"""Digests of memory are those that the engine reports of results."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from tests.schedule.numbers import digest
from wancoll._native import ffi, lib
from wancoll.client.cuda.staging import Staging
from wancoll.client.memory.arena import Arena
from wancoll.client.syncing.state import content, tensors_of
from wancoll.sync.manifest import STRIPE

BLOCK = 1 << 16


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_each_stripe_has_the_digest_of_its_bytes(threads: int) -> None:
    sizes = [1, BLOCK - 1, BLOCK, 0, BLOCK + 1, 3 * BLOCK, 64 * BLOCK, 5 * BLOCK + 7]
    parts = [np.random.default_rng(n).integers(0, 256, n + 1, np.uint8)[1:] for n in sizes]  # no alignment is needed
    stripes = ffi.new("wc_stripe[]", [(part.ctypes.data, part.nbytes, 0) for part in parts])
    assert lib.wc_digest_stripes(stripes, len(parts), threads) == 0
    assert [stripe.digest for stripe in stripes] == [digest(part.tobytes()) for part in parts]
    assert lib.wc_digest_stripes(stripes, 0, threads) == 0


def test_of_tensors_in_stripes() -> None:
    state = {"a": np.arange(STRIPE + 5, dtype=np.uint8), "b": np.empty(0), "c": np.arange(7.0)}
    expected = [state["a"][:STRIPE], state["a"][STRIPE:], state["c"]]
    found = content(tensors_of(state, changing=False), Staging(cast(Arena, None)), None)
    assert found.digests == b"".join(digest(part.tobytes()).to_bytes(8, "little") for part in expected)

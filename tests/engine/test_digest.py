"""Digests of memory are those that the engine reports of results."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tests.schedule.numbers import digest
from wancoll._native import ffi, lib
from wancoll.client.syncing.state import digest_stripes
from wancoll.sync.manifest import STRIPE

BLOCK = 1 << 16


@pytest.mark.parametrize("nbytes", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("stripe", [BLOCK, 2 * BLOCK, 64 * BLOCK])
def test_each_stripe_has_the_digest_of_its_bytes(nbytes: int, stripe: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 1, np.uint8)[1:]  # no alignment is needed
    cuts = range(0, nbytes, stripe)
    out = ffi.new("uint64_t[]", len(cuts))
    assert lib.wc_digest_stripes(data.ctypes.data, nbytes, stripe, out) == 0
    assert list(out) == [digest(data[at : at + stripe].tobytes()) for at in cuts]


def test_stripes_are_whole_blocks() -> None:
    for stripe in (0, BLOCK - 1, BLOCK + 8):
        assert lib.wc_digest_stripes(0, 0, stripe, ffi.NULL) == -errno.EINVAL


def test_of_a_tensor() -> None:
    data = np.random.default_rng(1).integers(0, 256, STRIPE + 5, np.uint8)
    expected = b"".join(digest(part.tobytes()).to_bytes(8, "little") for part in (data[:STRIPE], data[STRIPE:]))
    assert digest_stripes(data.ctypes.data, data.nbytes) == expected
    assert digest_stripes(0, 0) == b""

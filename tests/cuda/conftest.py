"""The stand-in, a seed for each test, and the daemon that tests/client plays: a sum is twice the input."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import comm, daemon, held, manual, world  # noqa: F401 -- fixtures
from tests.cuda.test_encode import host  # noqa: F401 -- a fixture
from tests.later import at_night
from wancoll.limits import BLOCK

SEEDS = [0, *at_night(*range(1, 50))]


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    from tests.cuda.gpu import Gpu, build, once

    return Gpu(once(tmp_path_factory.getbasetemp(), "standin", build))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of kilobytes go to a device before the commit, as large ones do."""
    monkeypatch.setattr("wancoll.client.cuda.staging.LEAST", 1)
    monkeypatch.setattr("wancoll.client.cuda.eager_copy.STEP", BLOCK)
    monkeypatch.setattr("wancoll.client.cuda.staging.CODED_LEAST", 1)


@pytest.fixture(params=SEEDS, ids="seed{}".format)
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def shared(standin: Any, seed: int) -> Iterator[Any]:
    """The stand-in, for tests whose communicators go on to the next one."""
    standin.violations()
    standin.lib.standin_seed(seed)
    yield standin
    standin.lib.standin_fail(0, 0)
    standin.lib.standin_break(0)
    standin.lib.standin_release()
    standin.lib.standin_most_registered(1 << 62)
    standin.lib.standin_most_pooled(1 << 62)
    standin.lib.standin_no_words(0)
    gc.collect()
    standin.lib.standin_drain()
    standin.free_all()
    assert standin.violations() == ""


@pytest.fixture
def kernels(shared: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:  # noqa: F811 -- a fixture
    """The stand-in, whose streams run the codecs' kernels on the host."""
    monkeypatch.setattr("wancoll.client.cuda.encode.compiled", lambda *capability: b"code for it")
    shared.lib.standin_kernels.argtypes = [ctypes.c_void_p]
    shared.lib.standin_kernels(ctypes.cast(host.launch, ctypes.c_void_p))
    yield shared
    shared.lib.standin_kernels(None)


@pytest.fixture
def gpu(shared: Any) -> Iterator[Any]:
    """The stand-in. At the end all that the product took of it must have come back."""
    before = shared.counts()
    yield shared
    gc.collect()
    shared.lib.standin_break(0)
    shared.lib.standin_release()
    shared.lib.standin_drain()
    shared.free_all()
    assert shared.counts() == before


@pytest.fixture
def path(gpu: Any, tmp_path: Path) -> str:
    """The daemon's socket. The fixtures of tests/client begin with it, so the device comes first, and ends last."""
    return str(tmp_path / "peer.sock")

"""What people train with: each kind of torch's parallelism over the backend, against one process."""

import pytest
import torch.distributed as dist

from tests.torch.ranks import run

REPLICAS = ["ddp", "unused_parameters", "sparse_gradients", "accumulation", "mixed_precision", "sync_batch_norm",
            "zero_redundancy_optimizer", "hooks"]  # fmt: skip
SHARDS = ["fsdp", "fsdp_mixed_precision", "tensor_parallel", "tensors", "pipeline", "checkpoints"]


def several(rank, size, names):
    """One world for many checks: a failure says which."""
    from tests.torch import data_parallel, sharded  # what they import warns, which pytest takes for errors

    dist.init_process_group("wancoll")
    for name in names:
        check = getattr(data_parallel, name, None) or getattr(sharded, name)
        try:
            check(rank, size)
        except Exception as bad:
            raise AssertionError(f"{name}, rank {rank} of {size}: {type(bad).__name__}: {bad}") from bad
    dist.destroy_process_group()


@pytest.mark.check
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, [*REPLICAS, "compiled", *SHARDS]),
        (4, ["ddp", "zero_redundancy_optimizer", "two_levels", "pipeline"]),
    ],
    ids=lambda each: str(each) if isinstance(each, int) else "",
)
def test_as_one_process(sockets, size, names):
    run(size, several, names, env=sockets[:size], timeout=200)

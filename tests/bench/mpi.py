"""One rank of an Open MPI job, started by mpirun: `mpirun -n N python tests/bench/mpi.py BYTES ITERATIONS`.

Rank 0 prints one line of JSON. It needs mpi4py, and nothing of this project: another interpreter may run it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI


def measure(nbytes: int, iterations: int) -> dict[str, float]:
    """All-reduce float32, sum, in place: the median seconds of an operation, and wrong elements of all ranks."""
    world = MPI.COMM_WORLD
    tensor = np.full(nbytes // 4, world.rank + 1, np.float32)
    world.Allreduce(MPI.IN_PLACE, tensor)
    wrong = int(np.count_nonzero(tensor != world.size * (world.size + 1) / 2))
    tensor.fill(0)
    times = []
    for _ in range(iterations + 1):  # the first warms up
        begin = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, tensor)
        times.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(times[1:]), "wrong": world.allreduce(wrong)}


if __name__ == "__main__":
    found = measure(*map(int, sys.argv[1:]))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found))

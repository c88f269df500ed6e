"""The reference executor: runs the schedules of all ranks in numpy. The engine must equal it bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

from wancoll.collective import Codec, DType, ReduceOp
from wancoll.schedule.execution import Run
from wancoll.schedule.numbers import Array
from wancoll.schedule.plan import Schedule


def execute(
    schedules: Sequence[Schedule],
    inputs: Sequence[Array],
    dtype: DType,
    op: ReduceOp,
    *,
    codec: Codec = Codec.none,
    back_bytes: Sequence[int] | None = None,
    noise: Sequence[tuple[int, int]] | None = None,
    order: int | None = None,
    cut: int = 0,
    lanes: int = 1,
) -> list[Array]:
    """Runs the schedules of all ranks as the engine does and returns every rank's result.

    Args:
        schedules: one for each rank.
        inputs: each rank's front: a one-dimensional array of dtype storage(dtype). They are not changed.
        dtype: what the elements are.
        op: the reduce op.
        codec: of what the schedules encode.
        back_bytes: size of each rank's result; None: that of its input.
        noise: two keys for each rank, of stochastic rounding: for measured encodes, and for all others. None: nearest.
        order: seed of a random order of all that may happen next; None: one rank after the other, as far as it comes.
        cut: steps are done in parts, cut at multiples of that many bytes of the whole; 0: in one piece.
        lanes: of every pair of ranks; part p of a step is on lane p % lanes. On a lane sends and receives are in order.

    Returns:
        Arrays of dtype storage(dtype).

    Raises:
        ValueError: the schedules do not fit together, a step reads what its bounds did not write, or a result is not
            written exactly once.
    """
    sizes = [front.nbytes for front in inputs] if back_bytes is None else back_bytes
    run = Run(schedules, inputs, dtype, op, codec, sizes, noise, cut, lanes)
    return run.results(order)

"""What a type checker makes of the public calls. Checked by mypy, never run: see test_public_types.py.

A line that must be refused ends in "# refused:" and the error's code.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

import wancoll
from wancoll import Communicator, ErrorFeedback, ManyReceipt, ManyWork, Receipt, SyncReceipt, Work

comm = wancoll.connect("gang", start_world=4, min_world=2, name="me", socket="peer.sock", timeout=1.5)
assert_type(comm, Communicator)
wancoll.connect(master="host:7400", lanes=4, peer_options=["--listen", "127.0.0.1:0"])
wancoll.connect(token="WC2...", timeout=30)
wancoll.connect(min_world="2")  # refused: arg-type
wancoll.connect(sockets="peer.sock")  # refused: call-arg

x = comm.empty((3, 4), "float32")
assert_type(x, np.ndarray[Any, Any])
assert_type(comm.zeros(5), np.ndarray[Any, Any])

# ---- who blocks gets a receipt, who does not a handle; both may say all there is to say ------------------

feedback = ErrorFeedback()
assert_type(comm.all_reduce(x), Receipt)
assert_type(comm.all_reduce(x, async_op=False), Receipt)
assert_type(comm.all_reduce(x, async_op=True), Work)
assert_type(comm.all_reduce(x, x, op="avg", codec="int8", feedback=feedback, name="w", timeout=3), Receipt)
assert_type(comm.all_reduce(x, max_rel_error=0.1, rounding="stochastic", seed=7, async_op=True), Work)
assert_type(comm.all_reduce(x, async_op=True).wait(timeout=30), Receipt)
assert_type(comm.all_reduce(x, async_op=True).done(), bool)


async def awaits() -> None:
    assert_type(await comm.all_reduce(x, async_op=True), Receipt)
    assert_type(await comm.all_reduce_many([x], async_op=True), ManyReceipt)


def train(comm: Communicator) -> int:
    return comm.rank


assert_type(wancoll.run(train, "gang", start_world=4, min_world=2, patience=60, timeout=5), int)
wancoll.run(train, start_wordl=4)  # refused: call-arg

assert_type(comm.all_reduce_many([x]), ManyReceipt)
assert_type(comm.all_reduce_many([x], async_op=False), ManyReceipt)
assert_type(comm.all_reduce_many((x, x), bucket_bytes=1 << 20, on_failure="raise", async_op=True), ManyWork)
assert_type(comm.all_reduce_many([x], async_op=True).wait(), ManyReceipt)
assert_type(comm.all_reduce_many([x]).receipts, tuple[Receipt, ...])

assert_type(comm.reduce_scatter(x, op="max", counts=[1, 2], algorithm="ring"), Receipt)
assert_type(comm.reduce_scatter(x, counts=(1, 2), async_op=True), Work)
assert_type(comm.reduce(x, None, 1, op="min", timeout=None), Receipt)
assert_type(comm.reduce(x, root=1, algorithm="tree", async_op=True), Work)
assert_type(comm.broadcast(x, 1, out=x, algorithm="ring"), Receipt)
assert_type(comm.broadcast(x, root=1, on_failure="raise", async_op=True), Work)
assert_type(comm.gather(x, x, 1, timeout=1), Receipt)
assert_type(comm.gather(x, root=1, async_op=True), Work)
assert_type(comm.scatter(None, x, 1, timeout=1), Receipt)
assert_type(comm.scatter(out=x, root=1, async_op=True), Work)
assert_type(comm.all_gather(x, counts=None), Receipt)
assert_type(comm.all_gather(x, x, counts=[1, 2], async_op=True), Work)
assert_type(comm.all_to_all(x, x, on_failure="retry"), Receipt)
assert_type(comm.all_to_all(x, algorithm="direct", async_op=True), Work)
assert_type(comm.send(x, 1, 7, timeout=1), Receipt)
assert_type(comm.send(x, dest=1, async_op=True), Work)
assert_type(comm.recv(x, 1, 7, timeout=1), Receipt)
assert_type(comm.recv(x, source=1, tag=7, async_op=True), Work)

assert_type(comm.barrier(timeout=1.0), Receipt)
assert_type(comm.update_membership(), Receipt)
assert_type(comm.update_membership(async_op=True), Work)
assert_type(comm.sync_state({"w": x}, revision=3, strategy="send-only", on_failure="raise", timeout=1), SyncReceipt)

# ---- what is refused, blocking or not --------------------------------------------------------------------

comm.all_reduce()  # refused: call-overload
comm.all_reduce(x, ops="sum")  # refused: call-overload
comm.all_reduce(x, ops="sum", async_op=True)  # refused: call-overload
comm.all_reduce(x, op=3)  # refused: call-overload
comm.all_reduce(x, op="mean")  # refused: call-overload
comm.all_reduce(x, codec="int16")  # refused: call-overload
comm.all_reduce(x, algorithm="rings")  # refused: call-overload
comm.broadcast(x, on_failure="ignore", async_op=True)  # refused: call-overload
comm.sync_state({"w": x}, revision=3, strategy="all")  # refused: arg-type
comm.all_reduce(x, timeout="1 s")  # refused: call-overload
comm.all_reduce(x, x, "sum")  # refused: call-overload
comm.all_reduce(x, counts=[1, 2])  # refused: call-overload
comm.all_reduce_many(x, bucket_bytes="1")  # refused: call-overload
comm.all_gather(x, op="sum")  # refused: call-overload
comm.all_gather(x, counts=8)  # refused: call-overload
comm.broadcast(x, 0, x)  # refused: call-overload
comm.gather(x, codec="int8", async_op=True)  # refused: call-overload
comm.reduce(x, root="1")  # refused: call-overload
comm.send(x)  # refused: call-overload
comm.send(x, 1, on_failure="raise")  # refused: call-overload
comm.recv(x, 1, async_op="yes")  # refused: call-overload
comm.barrier(async_op=True)  # refused: call-arg
comm.sync_state({"w": x})  # refused: call-arg
comm.rank = 3  # refused: misc

# ---- attributes ------------------------------------------------------------------------------------------

assert_type((comm.group, comm.name, comm.rank, comm.world_size), tuple[str, str, int, int])
assert_type((comm.epoch, comm.members, comm.pending), tuple[int, tuple[str, ...], tuple[Work, ...]])
receipt = comm.barrier()
assert_type((receipt.op_id, receipt.epoch, receipt.seq, receipt.attempts), tuple[str, int, int, int])
assert_type((receipt.contributors, receipt.world_size, receipt.digest), tuple[tuple[str, ...], int, str])
assert_type((receipt.algorithm, receipt.bytes_sent, receipt.seconds), tuple[str, int, float])
receipt.epoch = 3  # refused: misc
with wancoll.connect() as inside:
    assert_type(inside, Communicator)
try:
    comm.barrier()
except wancoll.WancollError as bad:
    assert_type((bad.what, bad.who, bad.expected, bad.got, bad.hint), tuple[str, str, str, str, str])

"""What is compared: torch's gloo, Open MPI, wancoll, wancoll's engine without daemon and commit, the bare C ring."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.ranks import ANSWER_TIMEOUT, Ranks, Sample
from wancoll import resources
from wancoll.chaos import Cluster
from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.limits import THREADS

LANES = 8
CONNECT_TIMEOUT = 30.0
RING_SOURCE = Path(__file__).with_name("ring.c")


class GlooMember:
    """torch.distributed with gloo over one network interface."""

    def __init__(self, rank: int, world_size: int, folder: str, interface: str = "lo") -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        self._tensors: dict[int, Any] = {}
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo-{world_size}", rank=rank, world_size=world_size
        )

    def _tensor(self, nbytes: int) -> Any:
        if nbytes not in self._tensors:
            self._tensors[nbytes] = self._torch.zeros(nbytes // 4)
        return self._tensors[nbytes]

    def tensor(self, mode: str, nbytes: int) -> np.ndarray:
        return self._tensor(nbytes).numpy()

    def all_reduce(self, mode: str, nbytes: int) -> int:
        self._dist.all_reduce(self._tensor(nbytes))
        return 0

    def close(self) -> None:
        self._dist.destroy_process_group()


class WancollMember:
    """wancoll's client. Modes: "arena" (comm.empty) and "outside" (an ordinary array)."""

    def __init__(self, rank: int, world_size: int, path: str) -> None:
        import wancoll

        self._comm = wancoll.connect(socket=path, group="bench", start_world=world_size, min_world=world_size)
        self._members = self._comm.members
        self._tensors: dict[tuple[str, int], np.ndarray] = {}

    def tensor(self, mode: str, nbytes: int) -> np.ndarray:
        if (mode, nbytes) not in self._tensors:
            made = self._comm.empty(nbytes // 4, np.float32) if mode == "arena" else np.empty(nbytes // 4, np.float32)
            self._tensors[mode, nbytes] = made
        return self._tensors[mode, nbytes]

    def all_reduce(self, mode: str, nbytes: int) -> int:
        receipt = self._comm.all_reduce(self._tensors[mode, nbytes])
        if receipt.contributors != self._members:
            raise RuntimeError(f"the group changed: {self._members} became {receipt.contributors}")
        return receipt.bytes_sent

    def close(self) -> None:
        self._comm.close()


class EngineMember:
    """wancoll's engine without client, daemon and commit. Modes: "plain", "checksum", "digest", "checksum+digest"."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        from wancoll.native.engine import Engine

        self._rank, self._world_size = rank, world_size
        self._engines = {}
        self._threads = max(1, min(THREADS, resources.cores() // world_size))  # as the plan says within a machine
        self._seq = 0
        self._tensors: dict[int, list[np.ndarray]] = {}
        self._prepared: dict[tuple[str, int], Any] = {}
        for checksum in (False, True):
            engine = self._engines[checksum] = Engine(workers=self._threads)
            for other, sockets in _connect_all(rank, world_size, f"{folder}/{int(checksum)}").items():
                engine.open_link(other, len(sockets), 1, self._threads)
                for lane, sock in enumerate(sockets):
                    sock.setblocking(False)
                    engine.attach_lane(other, lane, sock.detach(), checksum)

    def tensor(self, mode: str, nbytes: int) -> np.ndarray:
        if nbytes not in self._tensors:
            self._tensors[nbytes] = [np.zeros(nbytes // 4, np.float32) for _ in range(2)]
        return self._tensors[nbytes][0]

    def all_reduce(self, mode: str, nbytes: int) -> int:
        from wancoll.native.engine import Done

        engine = self._engines["checksum" in mode]
        if (mode, nbytes) not in self._prepared:
            self._prepared[mode, nbytes] = self._prepare(mode, nbytes)
        pair = self._tensors[nbytes]
        input_buffer, result_buffer = pair
        self._seq += 1
        engine.post(
            self._prepared[mode, nbytes],
            self._seq,
            1,
            self._seq,
            7,
            input_buffer.ctypes.data,
            result_buffer.ctypes.data,
        )
        while True:
            select.select([engine.fd], [], [])
            for event in engine.events():
                if not isinstance(event, Done):
                    raise RuntimeError(f"the engine says {event}")
                pair.reverse()
                return event.bytes_sent

    def _prepare(self, mode: str, nbytes: int) -> Any:
        from wancoll.native.engine import prepare
        from wancoll.schedule.choose import make
        from wancoll_master.plan.topology import LOCAL_STRIPE, SHARED_STRIPE

        return prepare(
            make(Descriptor(Kind.all_reduce, count=nbytes // 4), "ring", self._rank, self._world_size),
            {rank: rank for rank in range(self._world_size)},
            dtype=DType.float32,
            op=ReduceOp.sum,
            input_bytes=nbytes,
            result_bytes=nbytes,
            world_size=self._world_size,
            lanes=LANES,
            lane_groups=self._threads,
            stripe=LOCAL_STRIPE if self._threads == 1 else SHARED_STRIPE,
            turns=False,
            digest="digest" in mode,
        )

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def _connect_all(rank: int, world_size: int, folder: str) -> dict[int, list[socket.socket]]:
    """LANES connections with each ring neighbour, tuned as the daemon's; ports are exchanged through files."""
    neighbours = {(rank + 1) % world_size, (rank - 1) % world_size} - {rank}
    lanes: dict[int, list[socket.socket]] = {other: [] for other in neighbours}
    os.makedirs(folder, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0), backlog=4 * LANES) as listener:
        listener.settimeout(CONNECT_TIMEOUT)
        with open(f"{folder}/{rank}.new", "w") as file:
            file.write(str(listener.getsockname()[1]))
        os.rename(f"{folder}/{rank}.new", f"{folder}/{rank}")
        for other in (other for other in neighbours if other < rank):
            for lane in range(LANES):
                sock = socket.create_connection(("127.0.0.1", _port(f"{folder}/{other}")), CONNECT_TIMEOUT)
                sock.sendall(bytes([rank, lane]))
                lanes[other].append(sock)
        for _ in range(LANES * sum(other > rank for other in neighbours)):
            sock, _ = listener.accept()
            other, lane = sock.recv(1)[0], sock.recv(1)[0]
            lanes[other].append(sock)
            assert lane == len(lanes[other]) - 1
    from wancoll.limits import DEFAULT
    from wancoll.peer.links.lanes import tune

    for sockets in lanes.values():
        for sock in sockets:
            tune(sock, "", DEFAULT)
    return lanes


def _port(path: str) -> int:
    import time

    deadline = time.monotonic() + CONNECT_TIMEOUT
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no port in {path}")
        time.sleep(0.01)
    return int(Path(path).read_text())


class CRing:
    """ring.c, compiled here."""

    def __init__(self, ranks: int, binary: str, *options: str) -> None:
        self._process = subprocess.Popen(
            [binary, f"--ranks={ranks}", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, mode: str, nbytes: int, iterations: int) -> Sample:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{nbytes} {iterations}\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_TIMEOUT)[0]:
            raise TimeoutError(f"the C ring has not answered after {ANSWER_TIMEOUT:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the C ring ended with code {self._process.wait()}")
        answer = json.loads(line)
        return Sample(answer["seconds"], answer["wrong"], 0)

    def close(self) -> None:
        self._process.communicate()


class OpenMpi:
    """Open MPI's all-reduce over TCP, at the most direct: its ranks never sleep, so they live for one measurement only.

    Args:
        ranks: how many.
        binaries: folder of mpirun and of a Python that has mpi4py.
    """

    def __init__(self, ranks: int, binaries: str) -> None:
        tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
        self._command = [f"{binaries}/mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *tcp]
        self._command += [f"{binaries}/python", str(Path(__file__).with_name("mpi.py"))]

    def measure(self, mode: str, nbytes: int, iterations: int) -> Sample:
        done = subprocess.run(
            [*self._command, str(nbytes), str(iterations)],
            check=False,
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT,
        )
        if done.returncode:
            raise RuntimeError(f"Open MPI ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        answer = json.loads(done.stdout)
        return Sample(answer["seconds"], answer["wrong"], 0)


def compile_ring(folder: str) -> str:
    """Path of the binary."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "cc"
    binary = f"{folder}/ring"
    subprocess.run([compiler, "-std=c11", "-O3", "-o", binary, str(RING_SOURCE)], check=True)
    return binary


def wancoll_ranks(cluster: Cluster, name: str, ranks: int) -> Ranks:
    """A client process for each daemon of the cluster."""
    return Ranks(name, WancollMember, [(cluster.socket(i),) for i in range(ranks)])

"""Training on a Ray cluster: a daemon and a training process on each of so many nodes, and a master beside the driver.

    python deploy/ray/train.py --nodes 4

The package has to be installed on all nodes. Nodes dial each other, and the driver's node at port 7400. With
WANCOLL_JOIN (and WANCOLL_MASTER) set its daemons join that master, and none is started. The token is an argument of
Ray's: who reads what its cluster stores can join. A trainer that is lost is started again where Ray finds a node for
it, as a newcomer; the others go on meanwhile. A master that is lost with its driver ends the job.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import wancoll

WANCOLL = str(Path(sys.executable).with_name("wancoll"))
PORT = 7400
LATE = 60.0  # seconds for the others to end, once one has


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Trainer:
    """One for each node; its daemon is a private one, and ends with it."""

    def __init__(self):
        self.weights, self.step = np.zeros(1000, np.float32), 0

    def train(self, master, token, nodes):
        """Train until the end. Returns the step that it came to."""
        return wancoll.run(self.loop, master=master, token=token, start_world=nodes, patience=600)

    def catch_up(self, comm):
        """Give all members the state of the one that is furthest."""
        self.step = comm.sync_state({"weights": self.weights}, revision=self.step).revision

    def loop(self, comm):
        """Yours in place of it."""
        self.catch_up(comm)  # newcomers, and members that come back, begin here, too
        gradient = comm.empty(self.weights.shape, np.float32)
        while self.step < 100:
            gradient[:] = 1
            comm.all_reduce(gradient, op="avg")
            self.weights -= gradient
            self.step += 1
            if self.step % 10 == 0:
                comm.update_membership()  # admits joiners
                self.catch_up(comm)
        return self.step


def start_master(folder):
    """A master of this machine. Returns its process and a token that never expires."""
    keys, journal = f"{folder}/keys", f"{folder}/journal.sqlite"
    master = subprocess.Popen(
        [WANCOLL, "master", "--secure", "--listen", f"*:{PORT}", "--state", keys, "--journal", journal],
        stdout=subprocess.DEVNULL,  # its first line is a token, too
    )
    ask = [WANCOLL, "token", "create", "--expires", "0", "--state", keys, "--master", f"127.0.0.1:{PORT}"]
    while (said := subprocess.run(ask, capture_output=True, text=True, check=False)).returncode:
        if master.poll() is not None:
            sys.exit("the master has ended: see above why")
        time.sleep(0.2)
    return master, said.stdout.strip()


def main():
    """Place trainers on as many nodes, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=0, help="of each trainer")
    options = parser.parse_args()
    ray.init(address="auto")
    with tempfile.TemporaryDirectory() as folder:
        process, token, master = None, os.environ.get("WANCOLL_JOIN"), os.environ.get("WANCOLL_MASTER")
        if token is None:
            process, token = start_master(folder)
            master = f"{ray.util.get_node_ip_address()}:{PORT}"
        try:
            needs = {"CPU": 1, **({"GPU": options.gpus} if options.gpus else {})}
            group = placement_group([needs] * options.nodes, strategy="STRICT_SPREAD")
            ray.get(group.ready())
            trainers = [
                Trainer.options(
                    num_cpus=1,
                    num_gpus=options.gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
                ).remote()
                for i in range(options.nodes)
            ]
            under_way = [trainer.train.remote(master, token, options.nodes) for trainer in trainers]
            ray.wait(under_way, num_returns=1)  # all of them end at the same step, but for who is lost and has no node
            done, _ = ray.wait(under_way, num_returns=len(under_way), timeout=LATE)
            print(f"{len(done)} of {options.nodes} trainers came to step {max(ray.get(done))}")
        finally:
            if process is not None:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()

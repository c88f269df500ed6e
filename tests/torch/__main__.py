"""torch's own tests over wancoll, beside gloo: `python -m tests.torch` (`make torch-suite`).

DistributedTest comes with torch. test_c10d_fault_tolerance.py of torch's repository does not: `--fault-tolerance FILE`
names a copy (of the version of torch that is installed, 2.14 or later). Whatever passes with gloo has to pass here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

Outcomes = dict[str, tuple[str, str]]  # of each test: "passed", "failed" or "skipped", and why

HERE = Path(__file__).parent
PYTEST = (sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider")
_BARRIER = "torch lets monitored_barrier() through for a backend that is named gloo alone"
# What cannot pass whatever a backend does.
BY_NAME = {"test_monitored_barrier_gloo": _BARRIER, "test_monitored_barrier_gloo_subgroup": _BARRIER}


def run(file: Path, environment: dict[str, str], options: tuple[str, ...] = ()) -> Outcomes:
    """What pytest says of each test of a file."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        report = Path(folder) / "report.xml"
        root = str(HERE.parents[1])
        paths = os.pathsep.join(filter(None, (root, f"{root}/master", os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEMP_DIR": folder, "PYTHONPATH": paths, **environment}
        command = (*PYTEST, f"--junitxml={report}", "--timeout=900", *options, str(file))
        output = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
        if not report.exists():
            sys.exit(f"{' '.join(command)} made no report:\n{output.stdout[-4000:]}{output.stderr[-4000:]}")
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
            outcome = "passed" if not bad else "skipped" if bad[0].tag == "skipped" else "failed"
            outcomes[case.get("name", "")] = (outcome, _reason(bad[0]) if bad else "")
        return outcomes


def _reason(element: ElementTree.Element) -> str:
    """The line that says most: the last one of a traceback that is no frame."""
    lines = [line.strip() for line in (element.text or element.get("message") or "").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith(("File", "raise"))]
    return (errors or lines or [""])[-1][:200]


def compare(name: str, gloo: Outcomes, ours: Outcomes) -> bool:
    """Prints what ran, and what passes with one alone. True if nothing is worse than with gloo, but for BY_NAME."""
    ran = [test for test in gloo if (gloo[test][0], ours[test][0]) != ("skipped", "skipped")]
    width = max((len(test) for test in ran), default=0)
    print(f"\n{name}\n{'test':{width}}  gloo     wancoll")
    for test in ran:
        print(f"{test:{width}}  {gloo[test][0]:7}  {ours[test][0]}")
    print(f"and {len(gloo) - len(ran)} skipped with both\n")
    for backend, outcomes in (("gloo", gloo), ("wancoll", ours)):
        words = [outcome for outcome, _ in outcomes.values()]
        counts = ", ".join(f"{words.count(word)} {word}" for word in ("passed", "failed", "skipped"))
        print(f"{name}, {backend}: {counts} of {len(words)}")
    worse = [test for test in ran if gloo[test][0] == "passed" and ours[test][0] != "passed"]
    for test in worse:
        print(f"  only with gloo: {test}: {BY_NAME.get(test) or ': '.join(ours[test])}")
    for test in ran:
        if ours[test][0] == "failed" and test not in worse:
            print(f"  with neither: {test}: gloo: {gloo[test][1]}; wancoll: {ours[test][1]}")
        elif ours[test][0] == "passed" and gloo[test][0] != "passed":
            print(f"  only with wancoll: {test}: gloo: {': '.join(gloo[test])}")
    print(flush=True)
    return set(worse) <= BY_NAME.keys()


def beside(name: str, file: Path, environment: dict[str, str], options: tuple[str, ...]) -> bool:
    """Runs a file with both backends at once, and compares."""
    print(f"{name}, with gloo and with wancoll: some minutes", flush=True)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(run, file, {**environment, "UNDER_TEST": each}, options) for each in ("gloo", "wancoll")]
        return compare(name, *(each.result() for each in both))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch", description=__doc__)
    parser.add_argument("--world-sizes", type=int, nargs="*", default=[2, 3], help="of DistributedTest")
    parser.add_argument("--fault-tolerance", type=Path, help="torch's test/distributed/test_c10d_fault_tolerance.py")
    parser.add_argument("-k", dest="only", help="which tests, as pytest's -k")
    arguments = parser.parse_args()
    only = ("-k", arguments.only) if arguments.only else ()
    world = f"torch {torch.__version__}, DistributedTest, world {{}}".format
    classes = ("-o", "python_classes=TestDistributed")
    good = [
        beside(world(size), HERE / "distributed_suite.py", {"BACKEND": "gloo", "WORLD_SIZE": str(size)},
               (*classes, *only))
        for size in arguments.world_sizes
    ]  # fmt: skip
    if arguments.fault_tolerance is not None:
        file = str(arguments.fault_tolerance.resolve(strict=True))
        name = f"torch {torch.__version__}, test_c10d_fault_tolerance"
        good.append(beside(name, HERE / "fault_tolerance_suite.py", {"FAULT_TOLERANCE": file}, only))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

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
from pathlib import Path

HERE = Path(__file__).parent
PYTEST = (sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider")


def run(file: Path, environment: dict[str, str], options: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    """What pytest says of each test of a file: "passed", "failed" or "skipped", and why."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        report = Path(folder) / "report.xml"
        root = str(HERE.parents[1])
        paths = os.pathsep.join(filter(None, (root, f"{root}/master", os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEMP_DIR": folder, "PYTHONPATH": paths, **environment}
        command = (*PYTEST, f"--junitxml={report}", "--timeout=300", *options, str(file))
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


def compare(name: str, gloo: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]]) -> bool:
    """Prints both columns, and what passes with one alone. True if nothing is worse than with gloo."""
    for backend, outcomes in (("gloo", gloo), ("wancoll", ours)):
        words = [outcome for outcome, _ in outcomes.values()]
        counts = ", ".join(f"{words.count(word)} {word}" for word in ("passed", "failed", "skipped"))
        print(f"{name}, {backend}: {counts}", flush=True)
    worse = [test for test, (outcome, _) in gloo.items() if outcome == "passed" and ours[test][0] != "passed"]
    for test in worse:
        print(f"  only with gloo: {test}: {ours[test][0]}: {ours[test][1]}")
    for test, (outcome, why) in ours.items():
        if outcome == "failed" and test not in worse:
            print(f"  with neither: {test}: gloo: {gloo[test][1]}; wancoll: {why}")
        elif outcome == "passed" and gloo[test][0] != "passed":
            print(f"  only with wancoll: {test}: gloo: {gloo[test][0]}: {gloo[test][1]}")
    return not worse


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch", description=__doc__)
    parser.add_argument("--world-sizes", type=int, nargs="*", default=[2, 3], help="of DistributedTest")
    parser.add_argument("--fault-tolerance", type=Path, help="torch's test/distributed/test_c10d_fault_tolerance.py")
    parser.add_argument("-k", dest="only", help="which tests, as pytest's -k")
    arguments = parser.parse_args()
    only = ("-k", arguments.only) if arguments.only else ()
    good = True
    for size in arguments.world_sizes:
        outcomes = [
            run(
                HERE / "distributed_suite.py",
                {"BACKEND": "gloo", "UNDER_TEST": backend, "WORLD_SIZE": str(size)},
                ("-o", "python_classes=TestDistributed", *only),
            )
            for backend in ("gloo", "wancoll")
        ]
        good = compare(f"DistributedTest, world {size}", *outcomes) and good
    if arguments.fault_tolerance is not None:
        file = str(arguments.fault_tolerance.resolve(strict=True))
        outcomes = [
            run(HERE / "fault_tolerance_suite.py", {"FAULT_TOLERANCE": file, "UNDER_TEST": backend}, only)
            for backend in ("gloo", "wancoll")
        ]
        good = compare("test_c10d_fault_tolerance", *outcomes) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Files for systemd, containers, Compose, Kubernetes, Slurm, SkyPilot and workflows fit the commands they start."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import wancoll
from tests.cli.test_cli import option_names
from wancoll.cli.main import app
from wancoll.cli.variables import variable
from wancoll.limits import DEFAULT

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))
YAML = [*sorted(DEPLOY.rglob("*.yaml")), *sorted(DEPLOY.rglob("*.yml")), *WORKFLOWS]
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMMANDS = (
    "master",
    "peer",
    "status",
    "evict",
    "perf",
    "token create",
    "token list",
    "token revoke",
    "key show",
    "key rotate",
    "key revoke",
)
TEXTS = [DEPLOY / "Containerfile", DEPLOY / "slurm.sh", *YAML]
COMMAND = "/opt/wancoll/bin/wancoll"
ENVIRONMENTS = {"wancoll.env": "WANCOLL_JOIN", "master-etcd.env": "WANCOLL_ETCD"}  # and what they set
UNITS = {"wancoll-master.service": "master", "wancoll-peer@.service": "peer"}
SECRETS = {"WANCOLL_ETCD_PASSWORD"}  # no option: others on the machine would see it
CALL = re.compile(
    r"(?:\bwancoll|wancoll\"?) (master|peer|status|evict|perf|token create|key rotate)\b(?![-.])([^\n;|`)>]*)"
)


def names(command: str) -> tuple[set[str], set[str]]:
    """(options, environment variables) of a command."""
    found = app
    for word in command.split():
        found = found[word]
    options = option_names(found)
    return options, set(map(variable, options))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(thing: Any) -> Iterator[dict[str, Any]]:
    """Every pod's specification in what kubectl is given."""
    if isinstance(thing, dict):
        if "containers" in thing:
            yield thing
        for each in thing.values():
            yield from pods(each)
    elif isinstance(thing, list):
        for each in thing:
            yield from pods(each)


def containers(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(pod, container) of a file of Kubernetes."""
    for document in documents(path):
        for pod in pods(document):
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                yield pod, container


def scripts() -> dict[str, str]:
    """Every piece of shell, by a name."""
    found = {"slurm.sh": (DEPLOY / "slurm.sh").read_text()}
    for path in sorted((DEPLOY / "skypilot").glob("*.yaml")):
        (task,) = documents(path)
        found |= {f"{path.name} {part}": "#!/bin/bash\n" + task[part] for part in ("setup", "run")}
    for path in WORKFLOWS:
        (workflow,) = documents(path)
        for name, job in workflow["jobs"].items():
            for i, step in enumerate(job["steps"]):
                if "run" in step:
                    found[f"{path.name} {name} {i}"] = "#!/bin/bash\n" + step["run"] + "\n"
    (compose,) = documents(DEPLOY / "compose.yaml")
    for name, service in compose["services"].items():
        words = [*service.get("entrypoint", []), *service["command"]] if "command" in service else service["entrypoint"]
        if words[0] == "/bin/sh":
            found[f"compose {name}"] = "#!/bin/sh\n" + words[2].replace("$$", "$") + "\n"
    return found


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_variable_is_an_option_of_some_command(path):
    known = set().union(*(names(command)[1] for command in COMMANDS)) | SECRETS
    assert set(re.findall(r"\bWANCOLL_[A-Z_]+\b", path.read_text())) - known == set()


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_option_is_one_of_its_command(path):
    text = path.read_text().replace("\\\n", " ").replace('"$wancoll"', "wancoll")
    for command, rest in CALL.findall(text):
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - names(command)[0] == set(), (command, rest)


@pytest.mark.parametrize("path", KUBERNETES, ids=name_of)
def test_a_container_is_given_what_its_command_has(path):
    for _, container in containers(path):
        given = {one["name"] for one in container.get("env", [])}
        if "args" not in container:
            assert container["command"][0] == "install" or "|| install " in container["command"][2]
            assert not given
            continue
        command, *arguments = container["args"]
        options, variables = names(command)
        assert {one for one in given if one.startswith("WANCOLL_")} <= variables
        assert {one for one in arguments if one.startswith("--")} <= options


def test_a_service_of_compose_is_given_what_its_command_has():
    (compose,) = documents(DEPLOY / "compose.yaml")
    ours = {"master": "master", "token": "token create", "peer-1": "peer", "peer-2": "peer", "peer-3": "peer"}
    assert set(compose["services"]) == set(ours)
    for name, service in compose["services"].items():
        assert set(service["environment"]) <= names(ours[name])[1]
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(compose["volumes"])
    keys = [service["volumes"][-1] for name, service in compose["services"].items() if name.startswith("peer")]
    assert len(set(keys)) == len(keys)  # each its own


@pytest.mark.parametrize("path", KUBERNETES, ids=name_of)
def test_the_parts_of_a_pod_fit_each_other(path):
    user = re.search(r"^USER (\d+)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert user is not None
    claims = {
        claim["metadata"]["name"]
        for document in documents(path)
        for claim in document["spec"].get("volumeClaimTemplates", [])
    }
    for pod, container in containers(path):
        assert pod["securityContext"]["runAsUser"] == int(user[1])  # the socket is its user's alone
        assert not pod["enableServiceLinks"]
        assert container["image"] == f"wancoll:{version}"
        volumes = claims | {volume["name"] for volume in pod.get("volumes", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        given = {one["name"]: one.get("value") for one in container.get("env", [])}
        for probe, where in (("startup", "/readyz"), ("readiness", "/readyz"), ("liveness", "/healthz")):
            if f"{probe}Probe" in container:
                asked = container[f"{probe}Probe"]["httpGet"]
                assert asked["path"] == where
                assert given["WANCOLL_METRICS"].endswith(f":{ports[asked['port']]}")
                assert "WANCOLL_METRICS_TOKEN" in given  # beyond loopback it is a must


@pytest.mark.parametrize("path", KUBERNETES, ids=name_of)
def test_what_selects_pods_finds_them(path):
    for document in documents(path):
        spec = document["spec"]
        if "selector" in spec and document["kind"] != "Service":
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        elif document["kind"] == "Service":
            (owner,) = [other for other in documents(path) if other["kind"] == "StatefulSet"]
            assert owner["spec"]["serviceName"] == document["metadata"]["name"]
            assert spec["selector"].items() <= owner["spec"]["template"]["metadata"]["labels"].items()


def test_daemon_and_training_process_of_a_pod_share_the_socket():
    daemon, training = [container for _, container in containers(DEPLOY / "kubernetes/jobset.yaml")]
    sockets = [{one["name"]: one.get("value") for one in each["env"]}["WANCOLL_SOCKET"] for each in (daemon, training)]
    (mount,) = daemon["volumeMounts"]
    assert sockets[0] == sockets[1]
    assert training["volumeMounts"] == [mount]
    # Not in the volume's own folder, which all may write to: a daemon refuses that.
    assert Path(sockets[0]).parent != Path(mount["mountPath"])
    assert Path(sockets[0]).is_relative_to(mount["mountPath"])


@pytest.mark.parametrize("path", KUBERNETES, ids=name_of)
def test_kubernetes_knows_every_field(path):
    check = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        if document["kind"] == "JobSet":  # not Kubernetes' own; the job in it is
            (job,) = document["spec"]["replicatedJobs"]
            document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        check.validate(document, check.latest_version(), strict=True)


@pytest.mark.skipif(shutil.which("check-jsonschema") is None, reason="check-jsonschema is not installed")
@pytest.mark.parametrize(
    ("schema", "paths"), [("vendor.compose-spec", [DEPLOY / "compose.yaml"]), ("vendor.github-workflows", WORKFLOWS)]
)
def test_the_schemas_have_nothing_to_say(schema, paths):
    done = subprocess.run(
        ["check-jsonschema", "--builtin-schema", schema, *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", YAML, ids=name_of)
def test_it_is_yaml(path):
    assert all(isinstance(document, dict) for document in documents(path))


def test_shell_can_be_read():
    for name, text in scripts().items():
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), name


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(tmp_path):
    for i, (name, text) in enumerate(scripts().items()):
        (tmp_path / f"{i}.sh").write_text(f"{text.splitlines()[0]}\n# {name}\n" + text.partition("\n")[2])
    done = subprocess.run(["shellcheck", *tmp_path.iterdir()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_machine_of_skypilot_ends_with_a_daemon_that_ends(tmp_path):
    """SkyPilot starts the script without `set -e`."""
    for name, script in {
        ".venv/bin/wancoll": 'echo "$1" >>started\nexit 2', "sudo": "exit 1", "curl": "echo 192.0.2.1"
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAIN": ".venv/bin/wancoll perf"
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", scripts()["peer.yaml run"]], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=20, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "the daemon has ended: see above why\n")
    assert (tmp_path / "started").read_text() == "peer\n", "nothing trains without it"


def test_the_program_for_ray_calls_what_there_is():
    """Its syntax, what it asks the command for, and what it asks the package for. It is not run: no Ray is here."""
    tree = ast.parse((DEPLOY / "ray" / "train.py").read_text())
    calls = [
        [word.value if isinstance(word, ast.Constant) else "127.0.0.1:1" for word in node.elts[1:]]
        for node in ast.walk(tree)
        if isinstance(node, ast.List)
        and node.elts
        and isinstance(node.elts[0], ast.Name)
        and node.elts[0].id == "WANCOLL"
    ]
    assert sorted(words[0] for words in calls) == ["master", "token"]
    for words in calls:
        app.parse_args(words, exit_on_error=False, print_error=False)
    (run,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "wancoll.run")
    known = {*inspect.signature(wancoll.run).parameters, *inspect.signature(wancoll.connect).parameters}
    assert {keyword.arg for keyword in run.keywords} <= known
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "comm"
    }
    assert used
    assert all(hasattr(wancoll.Communicator, name) for name in used)


@pytest.mark.check
def test_the_job_runs_on_one_machine(tmp_path):
    """All of the job of Slurm but srun: master, token, daemon, command, and an end of all."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "WANCOLL"))}
    environment |= {"TMPDIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"),
                    "WANCOLL": str(Path(sys.executable).with_name("wancoll"))}  # fmt: skip

    def job(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [DEPLOY / "slurm.sh", *command], env=environment, capture_output=True, text=True, timeout=50, check=False
        )

    done = job(environment["WANCOLL"], "perf", "all_reduce", "--peers", "1", "--max-bytes", "4K", "--iters", "1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +4096 +1024 +float32 +sum .* ring$", done.stdout, re.MULTILINE)
    assert "WC2" not in done.stdout + done.stderr  # a job's log is for others' eyes, too
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert job("false").returncode == 1


# ---- systemd ------------------------------------------------------------------------------------------


def assigned(text: str) -> list[str]:
    """Names of the WANCOLL_ variables that *text* sets, also in comments that show how."""
    return re.findall(r"\b(WANCOLL_[A-Z_]+)=", text)


def settings(unit: str) -> dict[str, list[str]]:
    """The unit's settings, comments left out."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / unit).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_variable_in_an_environment_file_is_an_option(name):
    named = assigned((DEPLOY / name).read_text())
    assert ENVIRONMENTS[name] in named
    assert set(named) - names("master")[1] - names("peer")[1] - SECRETS == set()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_file_is_one_systemd_reads(name):
    for line in (DEPLOY / name).read_text().splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"WANCOLL_[A-Z_]+=\S+( \S+)*", line), line


@pytest.mark.parametrize("unit", UNITS)
def test_every_variable_in_a_unit_is_an_option_of_its_command(unit):
    found = settings(unit)
    for value in found.get("Environment", []):
        assert set(assigned(value)) <= names(UNITS[unit])[1]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_the_command_with_options_that_it_has(unit):
    (start,) = settings(unit)["ExecStart"]
    program, command, *arguments = start.split()
    assert program == COMMAND
    assert command == UNITS[unit]
    options = [argument for argument in arguments if argument.startswith("--")]
    assert set(options) <= names(command)[0]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_watched_and_restarted(unit):
    found = settings(unit)
    assert found["Type"] == ["notify"]
    assert found["Restart"] == ["always"]
    assert float(found["WatchdogSec"][0]) > 0
    assert "-/etc/wancoll/wancoll.env" in found["EnvironmentFile"]


def test_nothing_that_starts_a_master_again_says_that_it_is_the_first():
    """It may come back without its journal, while its groups run (R7)."""
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert any("wancoll master" in text for text in texts)
    assert not [text for text in texts if "--first" in text or "WANCOLL_FIRST" in text]


def test_a_twin_is_not_restarted_for_ever():
    assert settings("wancoll-peer@.service")["RestartPreventExitStatus"] == ["2 4"]  # a ConfigError, `wancoll leave`


def test_a_peer_may_wait_for_its_master_for_ever():
    """It is ready when a master has answered, and a new start would not bring that about."""
    assert settings("wancoll-peer@.service")["TimeoutStartSec"] == ["infinity"]


def test_the_peer_may_drain_before_it_is_killed():
    assert float(settings("wancoll-peer@.service")["TimeoutStopSec"][0]) > DEFAULT.drain_timeout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_has_nothing_to_say(tmp_path, unit):
    # The program need not be installed where the tests run: any that exists will do for the check.
    text = (DEPLOY / unit).read_text()
    assert COMMAND in text
    copy = tmp_path / unit.replace("@.", "@root.")
    copy.write_text(text.replace(COMMAND, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""The systemd units and their environment file fit the command that they start."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wancoll.cli.main import app

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = ("wancoll-master.service", "wancoll-peer@.service")
COMMAND = "/opt/wancoll/bin/wancoll"
ENVIRONMENTS = {"wancoll.env": "WANCOLL_JOIN", "master-etcd.env": "WANCOLL_ETCD"}  # and what they set
SERVICES = {"wancoll-master.service": "master", "wancoll-peer@.service": "peer"}


def variables(command: str) -> set[str]:
    """The environment variables of a command's options."""
    arguments = app[command].assemble_argument_collection(parse_docstring=False)
    return {"WANCOLL_" + argument.name.removeprefix("--").replace("-", "_").upper() for argument in arguments}


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
    secrets = {"WANCOLL_ETCD_PASSWORD"}  # no option: others on the machine would see it
    assert set(named) - variables("master") - variables("peer") - secrets == set()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_file_is_one_systemd_reads(name):
    for line in (DEPLOY / name).read_text().splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"WANCOLL_[A-Z_]+=\S+( \S+)*", line), line


@pytest.mark.parametrize("unit", UNITS)
def test_every_variable_in_a_unit_is_an_option_of_its_command(unit):
    found = settings(unit)
    for value in found.get("Environment", []):
        assert set(assigned(value)) <= variables(SERVICES[unit])


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_the_command_with_options_that_it_has(unit):
    (start,) = settings(unit)["ExecStart"]
    program, command, *arguments = start.split()
    assert program == COMMAND
    assert command == SERVICES[unit]
    options = [argument for argument in arguments if argument.startswith("--")]
    known = {
        name for argument in app[command].assemble_argument_collection(parse_docstring=False) for name in argument.names
    }
    assert set(options) <= known


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
    from wancoll.limits import DEFAULT

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

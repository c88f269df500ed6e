"""The alerts and the dashboard: they name what there is, and a real Prometheus takes them and finds data."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.metrics.support import documented, port_of, until
from wancoll.chaos import Cluster, in_threads

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS, DASHBOARD = DEPLOY / "alerts.yml", DEPLOY / "grafana-dashboard.json"
TOKEN = "a-token-of-24-characters"
TCP = "--no-shared-memory"  # of which the kernel knows round trips
DEADLINE = 60.0  # seconds for anything that Prometheus has to find out
METRIC = re.compile(r"\bwancoll_\w+")
# What this small cluster has no reason to tell: nobody is waited for, lost or refused.
NO_DATA = {"Waits for", "Slow operations that wait for a member", "Operations that fail"}
NO_DATA |= {"Damaged, and refused", "Members lost", "Recovery", "Out, by why", "State moved to who lacks it"}

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="there is no prometheus here; Debian's package is called prometheus",
)


def panels() -> list[dict[str, Any]]:
    return [one for one in json.loads(DASHBOARD.read_text())["panels"] if one["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Title and expression, as Grafana asks for all groups."""
    for panel in panels():
        for target in panel["targets"]:
            expr = target["expr"].replace("$__rate_interval", "1m").replace("$__range", "1h").replace("$group", ".*")
            assert "$" not in expr, panel["title"]
            yield panel["title"], expr


def names(text: str) -> set[str]:
    return set(METRIC.findall(text))


def known() -> set[str]:
    """All names that a scrape may have."""
    found = set()
    for name, kind, _, _ in documented():
        found |= {f"{name}_{end}" for end in ("bucket", "count", "sum")} if kind == "histogram" else {name}
    return found


def test_alerts_and_dashboard_name_only_what_is_documented() -> None:
    alerts = "\n".join(line for line in ALERTS.read_text().splitlines() if "description" not in line)
    asked = " ".join(expr for _, expr in queries())
    assert len(names(alerts)) > 10
    assert len(names(asked)) > 30
    assert names(alerts) - known() == set()
    assert names(ALERTS.read_text()) - known() == set()
    assert names(DASHBOARD.read_text()) - known() == set()


def test_labels_in_the_dashboards_words_are_labels() -> None:
    labels = {label for _, _, of, _ in documented() for label in of} | {"instance"}
    used = set(re.findall(r"{{(\w+)}}", DASHBOARD.read_text()))
    assert used - labels == set()
    used = set(re.findall(r"\$labels\.(\w+)", ALERTS.read_text()))
    assert used - labels == set()
    grouped = {one for found in re.findall(r"by \(([\w, ]+)\)", ALERTS.read_text() + DASHBOARD.read_text())
               for one in found.split(", ")}  # fmt: skip
    assert grouped - labels == {"le"}


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for one in json.loads(DASHBOARD.read_text())["panels"]:
        at = one["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, one["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    numbers = [one["id"] for one in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(set(numbers)) == len(numbers)


@needs_prometheus
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", ALERTS], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


CASES = [  # alert, at which minute, series that make it fire, and series that do not
    ("WancollDown", 2, {'up{job="wancoll",instance="a"}': "0x9"}, {'up{job="wancoll",instance="a"}': "1x9"}),
    ("WancollNoLeader", 2, {"wancoll_master_leads": "0x9"}, {"wancoll_master_leads": "1x9"}),
    ("WancollNoLeader", 4, {"wancoll_master_leads": "1 1 stale"},  # the only one has ended
     {'wancoll_master_leads{instance="a"}': "1 1 stale", 'wancoll_master_leads{instance="b"}': "0 0 1x9"}),
    ("WancollNoMaster", 2, {"wancoll_master_connected": "0x9"}, {"wancoll_master_connected": "1x9"}),
    ("WancollMembersLost", 3, {'wancoll_lost_members_total{group="g"}': "0 0 1 1 1"},
     {'wancoll_lost_members_total{group="g"}': "1x9"}),
    ("WancollOperationsFail", 1, {'wancoll_operations_total{group="g",outcome="Evicted"}': "_ 1 1"},
     {'wancoll_operations_total{group="g",outcome="committed"}': "0+5x9"}),
    ("WancollOperationsFail", 9, {'wancoll_operations_total{group="g",outcome="Evicted"}': "1 1 1 1 1 1 1 1 2 2"},
     {'wancoll_operations_total{group="g",outcome="Evicted"}': "1x9"}),
    ("WancollOperationStuck", 1, {'wancoll_oldest_operation_seconds{group="g"}': "121x9"},
     {'wancoll_oldest_operation_seconds{group="g"}': "119x9"}),
    ("WancollWaitsForMember", 1, {'wancoll_master_waited_for_seconds{group="g",member="m"}': "61x9"},
     {'wancoll_master_waited_for_seconds{group="g",member="m"}': "59x9"}),
    ("WancollMembershipUnsteady", 9, {'wancoll_epochs_total{group="g"}': "0+5x9"},
     {'wancoll_epochs_total{group="g"}': "0+1x9"}),
    ("WancollLossyLink", 12,
     {'wancoll_link_retransmitted_segments_total{daemon="d"}': "0+100x20",
      'wancoll_link_segments_total{daemon="d"}': "0+1000x20"},
     {'wancoll_link_retransmitted_segments_total{daemon="d"}': "0+10x20",
      'wancoll_link_segments_total{daemon="d"}': "0+1000x20"}),
    ("WancollCorruptBytes", 5, {'wancoll_link_checksum_failures_total{daemon="d"}': "0 0 1x9"},
     {'wancoll_link_checksum_failures_total{daemon="d"}': "1x9"}),
    ("WancollEventLoopSlow", 12,
     {'wancoll_event_loop_lag_seconds_bucket{le="0.25"}': "0x20",
      'wancoll_event_loop_lag_seconds_bucket{le="0.5"}': "0+60x20",
      'wancoll_event_loop_lag_seconds_bucket{le="+Inf"}': "0+60x20"},
     {'wancoll_event_loop_lag_seconds_bucket{le="0.25"}': "0+60x20",
      'wancoll_event_loop_lag_seconds_bucket{le="0.5"}': "0+60x20",
      'wancoll_event_loop_lag_seconds_bucket{le="+Inf"}': "0+60x20"}),
    ("WancollMessagesRefused", 1, {'wancoll_master_messages_refused_total{message="Join"}': "_ 1 1"},
     {'wancoll_master_messages_refused_total{message="Join"}': "_x9"}),
    ("WancollMessagesRefused", 9, {'wancoll_master_messages_refused_total{message="Join"}': "1 1 1 1 1 1 1 1 2 2"},
     {'wancoll_master_messages_refused_total{message="Join"}': "1x9"}),
]  # fmt: skip


@needs_prometheus
def test_each_alert_fires_where_it_should_and_not_else(tmp_path: Path) -> None:
    assert {case[0] for case in CASES} == set(re.findall(r"alert: (\w+)", ALERTS.read_text()))

    def case(alert: str, minute: int, series: dict[str, str], fires: bool) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": int(fires)}],
                }
            ],
        }

    tests = [case(*one[:3], True) for one in CASES] + [case(*one[:2], one[3], False) for one in CASES]
    file = tmp_path / "tests.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "30s", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A real one, that asks *targets* twice a second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._at = f"127.0.0.1:{free.getsockname()[1]}"
        (folder / "token").write_text(TOKEN)
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "200ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {
                    "job_name": "wancoll",
                    "authorization": {"credentials_file": str(folder / "token")},
                    "static_configs": [{"targets": targets}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        checked = subprocess.run(
            ["promtool", "check", "config", folder / "prometheus.yml"], capture_output=True, text=True, timeout=30,
            check=False,
        )  # fmt: skip
        assert checked.returncode == 0, checked.stdout + checked.stderr
        arguments = [
            f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self._at}", "--log.level=warn",
        ]  # fmt: skip
        self._log = open(folder / "log", "wb")  # noqa: SIM115 - close() does
        self._process = subprocess.Popen(["prometheus", *arguments], stdout=self._log, stderr=self._log)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def get(self, path: str, **query: str) -> Any:
        """The answer's data; an error in an expression is raised."""
        url = f"http://{self._at}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def ask(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Of each series its labels and its value now."""
        return [(one["metric"], float(one["value"][1])) for one in self.get("query", query=expr)["result"]]


@needs_prometheus
@pytest.mark.check
@pytest.mark.timeout(150)
def test_prometheus_finds_a_cluster_and_what_the_dashboard_shows_and_says_who_was_lost(tmp_path: Path) -> None:
    option, env = ["--metrics=127.0.0.1:0"], {"WANCOLL_METRICS_TOKEN": TOKEN}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(3, fork=True, peer_args=[*option, TCP], master_args=option, env=env))
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=3), 3, 30)
        targets = [port_of(cluster.logs(i, 1000)) for i in range(3)] + [port_of(cluster.master_logs(1000))]
        prometheus = Prometheus(tmp_path, targets)
        stack.callback(prometheus.close)
        up = until(
            lambda: prometheus.ask('up{job="wancoll"}'),
            lambda found: len(found) == 4 and all(v for _, v in found),
            DEADLINE,
        )
        assert sorted(one["instance"] for one, value in up if value == 1) == sorted(targets)

        def work(members: int) -> None:
            in_threads(lambda i: comms[i].all_reduce(np.ones(1000, np.float32)), members, 30)

        done = 0
        committed = 'wancoll_operations_total{outcome="committed"}'

        def moving() -> list[tuple[dict[str, str], float]]:
            nonlocal done
            work(3)
            done += 1
            return prometheus.ask("rate(wancoll_operation_bus_bytes_total[1m])")

        rates = until(moving, lambda found: len(found) == 3 and all(value > 0 for _, value in found), DEADLINE)
        assert [value > 0 for _, value in rates] == [True] * 3
        counts = until(
            lambda: prometheus.ask(committed), lambda found: {value for _, value in found} == {done}, DEADLINE
        )
        assert [value for _, value in counts] == [done] * 3
        for title, expr in queries():
            assert prometheus.ask(expr) or title in NO_DATA, (title, expr)

        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == {case[0] for case in CASES}
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        assert prometheus.ask('ALERTS{alertstate="firing"}') == []
        cluster.kill(2)
        work(2)
        firing = 'ALERTS{alertstate="firing"}'
        alerts = until(lambda: prometheus.ask(firing), bool, DEADLINE)
        assert [(one["alertname"], one["group"]) for one, _ in alerts] == [("WancollMembersLost", "g")]
        # The daemons tell of the loss, too, and the master may be asked later than they.
        lost = until(lambda: prometheus.ask("sum by (reason) (wancoll_master_evictions_total)"), bool, DEADLINE)
        assert lost == [({"reason": "daemon died"}, 1.0)]

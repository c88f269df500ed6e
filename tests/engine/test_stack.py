"""The engine's C files are a stack: no file calls another by way of which it is called itself."""

from __future__ import annotations

import re
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "native/engine"
TLS = {"tls.c", "openssl.c", "records.c"}  # one thing in three files
NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
DEFINED = re.compile(r"^(?!static\b|typedef\b)\w[\w *]*?\b(\w+)\([^;{}]*\)\n\{", re.MULTILINE)


def calls(files: dict[str, str]) -> dict[str, set[str]]:
    """Which other files each file calls, or names a function of: by the names of functions that are not static."""
    code = {name: NO_CODE.sub(" ", text) for name, text in files.items()}
    home = {function: name for name, text in code.items() for function in DEFINED.findall(text)}
    found = {name: {home[word] for word in re.findall(r"\w+", text) if word in home} for name, text in code.items()}
    return {name: called - {name} - (TLS if name in TLS else set()) for name, called in found.items()}


def circle(graph: dict[str, set[str]]) -> set[str]:
    """The files that call themselves by way of others."""
    left = dict(graph)
    while ends := [name for name, called in left.items() if not called & left.keys()]:
        for name in ends:
            del left[name]
    while starts := [name for name in left if not any(name in called for called in left.values())]:
        for name in starts:
            del left[name]
    return set(left)


def test_no_circle_of_files() -> None:
    graph = calls({path.name: path.read_text() for path in ENGINE.rglob("*.c")})
    assert {"lane_send.c", "lane_receive.c"} <= graph["lane_group.c"]  # it does read calls
    assert circle(graph) == set()


def test_a_circle_is_found() -> None:
    files = {
        "worker.c": "void wc_run(void)\n{\n    wc_send(1);\n}\n",
        "lane.c": "int *wc_send(int a,\n             int b)\n{\n    return wc_move(a); /* not wc_run() */\n}\n",
        "part.c": "static void go(void)\n{\n    wc_send(0);\n}\n\nint *wc_move(int a)\n{\n    go();\n}\n",
        "events.c": 'void wc_tell(void)\n{\n    say("wc_run");\n}\n',
    }
    assert circle(calls(files)) == {"lane.c", "part.c"}

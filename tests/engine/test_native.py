"""The stub of the extension says what the headers say: every function, with its arguments, and the structs' fields."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wancoll import _native

ROOT = Path(__file__).parents[2]
TREE = ast.parse((ROOT / "wancoll" / "_native.pyi").read_text())
STUB = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}
STRUCTS = {
    "Config": "wc_config",
    "Place": "wc_place",
    "Step": "wc_step",
    "Op": "wc_op",
    "Event": "wc_event",
    "LaneStats": "wc_lane_stats",
    "Block": "wc_block",
    "CodecBlock": "wc_codec_block",
    "Kernels": "wc_kernels",
}


def test_every_function_is_there_with_its_arguments() -> None:
    functions = {}
    for name in dir(_native.lib):
        kind = _native.ffi.typeof(getattr(_native.lib, name)) if name.startswith("wc_") else None
        if kind is not None and kind.kind == "function":
            functions[name] = len(kind.args)
    assert len(functions) > 20
    methods = [node for node in STUB["_Lib"].body if isinstance(node, ast.FunctionDef)]
    assert {node.name: len(node.args.posonlyargs + node.args.args) - 1 for node in methods} == functions


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_have_their_fields(name: str) -> None:
    fields = [field for field, _ in _native.ffi.typeof(STRUCTS[name]).fields]
    named = [node.target.id for node in STUB[name].body if isinstance(node, ast.AnnAssign)]
    named += [node.name for node in STUB[name].body if isinstance(node, ast.FunctionDef)]
    assert named == fields


def test_constants_are_there() -> None:
    named = {node.target.id: node.annotation.id for node in STUB["_Lib"].body if isinstance(node, ast.AnnAssign)}
    assert named
    for name, kind in named.items():
        constant = getattr(_native.lib, name)
        assert isinstance(constant, int) if kind == "int" else _native.ffi.string(constant)


def test_without_a_compiler_the_build_says_so_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "build_ext", f"--build-temp={tmp_path}", f"--build-lib={tmp_path}"]
    environment = {**os.environ, "CC": "no-such-compiler"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = "wancoll: there is no C compiler (no-such-compiler): install gcc or clang, or name yours in CC"
    assert (ran.returncode, ran.stderr.splitlines()[-1:]) == (1, [said])
    assert "Traceback" not in ran.stderr

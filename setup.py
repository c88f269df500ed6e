"""Builds the extension wancoll._native; all else is in pyproject.toml."""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext


class Build(build_ext):
    """Says in one line what is missing, where setuptools would show a traceback."""

    def run(self) -> None:
        """Look, then build."""
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
        if shutil.which(compiler) is None:
            sys.exit(f"wancoll: there is no C compiler ({compiler}): install gcc or clang, or name yours in CC")
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.exists():
            sys.exit(f"wancoll: there is no {header}: install Python's headers (python3-dev, python3-devel)")
        super().run()


setup(
    cffi_modules=["native/build.py:ffi_builder"],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # the wheel's name says what native/build.py does
)

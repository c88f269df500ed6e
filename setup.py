"""Builds the extension wancoll._native; all else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["native/build.py:ffi_builder"])

"""What native/build.py builds; cffi gives it no types."""

from typing import Any

ffi: Any
lib: Any

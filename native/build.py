"""Builds wancoll._native with cffi (API mode). The headers beside this file are the one source of its declarations."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
FACES = ("kernels.h", "engine.h", "digest.h", "pages.h", "fill.h", "calls.h", "engine/calls/law.h")
ROOMS = ("engine", "engine/calls", "engine/lanes", "engine/operations", "engine/streams", "kernels")
TEXTS = {
    "wc_cuda_text": "kernels/cuda.cu",
    "wc_arithmetic_text": "kernels/arithmetic.h",
}  # that devices' kernels are of
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]


def declarations(header: Path) -> str:
    """The header as cffi reads it: without preprocessor lines, but for plain integer constants."""
    kept = []
    for line in header.read_text().splitlines():
        words = line.split("/*")[0].split()
        if not line.startswith("#"):
            kept.append(line)
        elif words[0] == "#define" and len(words) == 3:
            kept.append(f"#define {words[1]} {words[2].rstrip('uUlL')}")
    return "\n".join(kept)


def relative(path: Path) -> str:
    """A path as setuptools wants it: relative to setup.py."""
    return path.relative_to(HERE.parent).as_posix()


def text(name: str) -> str:
    """The definition of a constant that holds a file."""
    lines = (HERE / TEXTS[name]).read_text().replace("\\", "\\\\").replace('"', '\\"').splitlines()
    return "\n".join([f"static const char {name}[] =", *(f'    "{line}\\n"' for line in lines)]) + ";"


ffi_builder = FFI()
for _face in FACES:
    ffi_builder.cdef(declarations(HERE / _face))
for _name in TEXTS:
    ffi_builder.cdef(f"static const char {_name}[];")
ffi_builder.set_source(
    "wancoll._native",
    "\n".join([*(f'#include "{face}"' for face in FACES), *(text(name) for name in TEXTS)]),
    sources=[relative(source) for room in (".", *ROOMS) for source in sorted((HERE / room).glob("*.c"))],
    depends=[
        relative(header)
        for room in (".", "vendor", *ROOMS)
        for end in ("h", "cu")
        for header in sorted((HERE / room).glob(f"*.{end}"))
    ],
    include_dirs=[relative(HERE), relative(HERE / "engine")],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread", "-ldl", "-lm"],
    py_limited_api=True,
)

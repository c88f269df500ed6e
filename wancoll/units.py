"""Durations, rates and sizes as people write them: read, and written again."""

from __future__ import annotations

import re
from collections.abc import Container

from wancoll.errors import ConfigError

DURATIONS = {"ns": -9, "us": -6, "µs": -6, "ms": -3, "s": 0}  # powers of ten, seconds
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
RATES = {f"{prefix}B/s": float(factor) for prefix, factor in _PREFIXES.items()} | {
    f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIXES.items()
}  # bytes per second
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?([^\d\s.]\S*)", re.ASCII)
_SIZE = re.compile(r"(\d{1,15}) ?(?:([KMGT])(iB|B)?|B)?", re.ASCII | re.IGNORECASE)


def parse_duration(text: str, what: str) -> float:
    """Seconds of "5us", "40ms" or "0.2s", a number and a unit of DURATIONS; 0 is one.

    Raises:
        ConfigError: not of that form; *what* is the option that it is for.
    """
    number, unit = _measure(text, what, DURATIONS, "a duration", "a number and ns, us, ms or s, such as 5us or 40ms")
    return float(f"{number}e{DURATIONS[unit]}")  # exactly what float("5e-6") is


def parse_rate(text: str, what: str) -> float:
    """Bytes per second of "100GB/s" (10^9 bytes), "500Mbit/s" or "1.5GiB/s", a number above 0 and a unit of RATES.

    Raises:
        ConfigError: not of that form; *what* is the option that it is for.
    """
    expected = (
        "a number above 0 and a unit such as B/s, MB/s, GB/s, GiB/s, Mbit/s or Gbit/s, as in 100GB/s or 500Mbit/s"
    )
    number, unit = _measure(text, what, RATES, "a rate", expected)
    rate = float(number) * RATES[unit]
    if rate <= 0:
        raise _refused("no rate", text, what, expected)
    return rate


def parse_size(text: str, what: str) -> int:
    """Bytes of "4096", "1K", "64MiB", "2G" (powers of 1024) or "2GB" (powers of 1000): whole, and above 0.

    Raises:
        ConfigError: not of that form; *what* is the option that it is for.
    """
    match = _SIZE.fullmatch(text.strip())
    base = 1000 if match and (match[3] or "").upper() == "B" else 1024
    size = int(match[1]) * base ** " KMGT".index((match[2] or " ").upper()) if match else 0
    if not 0 < size <= 1 << 60:
        expected = "bytes, 1 to 2^60, such as 4096, 64K, 64KiB or 2G (powers of 1024), 2GB (powers of 1000)"
        raise _refused("no size", text, what, expected)
    return size


def format_bytes(nbytes: float, digits: int = 3) -> str:
    """Such as "1.75 GB", powers of 1000: what goes over links whose rates are in these."""
    return format_rate(nbytes, digits).removesuffix("/s")


def format_duration(seconds: float, digits: int = 6) -> str:
    """Such as "5 us", "40 ms" or "1.5 s"."""
    seconds = float(f"{seconds:.{digits}g}")  # first: 999.9 ms to three digits is 1 s
    for unit in ("s", "ms", "us"):
        if seconds >= 10.0 ** DURATIONS[unit]:
            return f"{seconds * 10.0 ** -DURATIONS[unit]:.12g} {unit}"
    return f"{seconds * 1e9:.12g} ns" if seconds else "0 us"


def format_rate(rate: float, digits: int = 6) -> str:
    """Such as "100 GB/s" or "62.5 MB/s", powers of 1000."""
    rate = float(f"{rate:.{digits}g}")  # first: 999.9 MB/s to three digits is 1 GB/s
    for unit in ("TB/s", "GB/s", "MB/s", "kB/s"):
        if rate >= RATES[unit]:
            return f"{rate / RATES[unit]:.12g} {unit}"
    return f"{rate:.12g} B/s"


def _measure(text: str, what: str, units: Container[str], kind: str, expected: str) -> tuple[str, str]:
    match = _NUMBER.fullmatch(text.strip())
    if not match or match[2] not in units:
        raise _refused(f"not {kind}", text, what, expected)
    return match[1], match[2]


def _refused(why: str, text: str, what: str, expected: str) -> ConfigError:
    return ConfigError(why, who=what, expected=expected, got=repr(text))

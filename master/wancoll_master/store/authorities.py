"""A master's authorities with their keys, and how far the rotation is, as one text: so that no crash keeps half of it.

Whoever keeps it keeps it from others: in a file of the state folder, or sealed in etcd.
"""

from __future__ import annotations

import msgspec

from wancoll.trust.authority import Authority
from wancoll_master.core.rotation import Phase, Rotation


class _One(msgspec.Struct, frozen=True):
    key: str
    certificate: str


class _Kept(msgspec.Struct, frozen=True):
    authorities: list[_One]
    phase: Phase = "steady"
    since: float = 0.0
    until: float = 0.0
    period: float = 0.0
    id: str = ""


def as_text(rotation: Rotation[Authority], id: str = "") -> str:
    """It; *id* names it in etcd."""
    all_of_them = [_One(one.key.decode(), one.certificate.decode()) for one in rotation.authorities]
    return msgspec.json.encode(
        _Kept(all_of_them, rotation.phase, rotation.since, rotation.until, rotation.period, id)
    ).decode()


def from_text(text: bytes | str) -> tuple[Rotation[Authority], str]:
    """It, and its id. Raises ValueError: no master of this version wrote it."""
    kept = msgspec.json.decode(text, type=_Kept)
    found = tuple(Authority(one.key.encode(), one.certificate.encode()) for one in kept.authorities)
    return Rotation(found, kept.phase, kept.since, kept.until, kept.period), kept.id

"""wancoll: collectives over many TCP connections that outlive their peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wancoll.errors import (
    ArenaFull,
    AskedToLeave,
    CollectiveMismatch,
    ConfigError,
    DeviceError,
    Evicted,
    MasterUnreachable,
    OperationAborted,
    OutcomeUnknown,
    PeerDaemonLost,
    ProtocolError,
    TimeoutError,
    WancollError,
    WorldTooSmall,
)

if TYPE_CHECKING:
    from wancoll.client.codecs import ErrorFeedback
    from wancoll.client.communicator import Communicator
    from wancoll.client.connect import connect
    from wancoll.client.many import ManyReceipt, ManyWork
    from wancoll.client.run import run
    from wancoll.client.work import Work
    from wancoll.collective import Receipt
    from wancoll.sync.receipt import SyncReceipt

__all__ = [
    "ArenaFull",
    "AskedToLeave",
    "CollectiveMismatch",
    "Communicator",
    "ConfigError",
    "DeviceError",
    "ErrorFeedback",
    "Evicted",
    "ManyReceipt",
    "ManyWork",
    "MasterUnreachable",
    "OperationAborted",
    "OutcomeUnknown",
    "PeerDaemonLost",
    "ProtocolError",
    "Receipt",
    "SyncReceipt",
    "TimeoutError",
    "WancollError",
    "Work",
    "WorldTooSmall",
    "connect",
    "run",
]

# Imported at first use: the master and the commands need neither numpy nor the extension.
_LAZY = {
    "Communicator": "wancoll.client.communicator",
    "ErrorFeedback": "wancoll.client.codecs",
    "ManyReceipt": "wancoll.client.many",
    "ManyWork": "wancoll.client.many",
    "Receipt": "wancoll.collective",
    "SyncReceipt": "wancoll.sync.receipt",
    "Work": "wancoll.client.work",
    "connect": "wancoll.client.connect",
    "run": "wancoll.client.run",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'wancoll' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

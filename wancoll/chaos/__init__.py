"""`wancoll chaos` breaks a cluster by a seeded plan. The cluster itself, and what else breaks, is wancoll.testing's."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wancoll.testing import ClientProcess, Cluster, Etcd, in_threads

__all__ = ["ClientProcess", "Cluster", "Etcd", "in_threads"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'wancoll.chaos' has no attribute {name!r}")
    from wancoll import testing  # at first use: the pure parts of this room need none of it

    return getattr(testing, name)

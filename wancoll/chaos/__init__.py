"""wancoll.chaos: clusters to break. A master and peer daemons on loopback, each a process of its own."""

from wancoll.chaos.clients import ClientProcess
from wancoll.chaos.cluster import Cluster
from wancoll.chaos.threads import in_threads

__all__ = ["ClientProcess", "Cluster", "in_threads"]

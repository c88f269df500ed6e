"""wancoll.chaos: clusters to break. Masters and peer daemons on loopback, each a process of its own; an etcd."""

from wancoll.chaos.clients import ClientProcess
from wancoll.chaos.cluster import Cluster
from wancoll.chaos.etcd import Etcd
from wancoll.chaos.threads import in_threads

__all__ = ["ClientProcess", "Cluster", "Etcd", "in_threads"]

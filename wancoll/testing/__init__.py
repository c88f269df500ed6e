"""Test training under faults: clusters to break, on loopback or a network of your own; clients; an etcd; a proxy."""

from wancoll.testing.cluster import Cluster
from wancoll.testing.etcd import Etcd
from wancoll.testing.network import Network
from wancoll.testing.processes import Ask, ClientProcess, tell
from wancoll.testing.proxy import Proxies
from wancoll.testing.threads import in_threads

__all__ = ["Ask", "ClientProcess", "Cluster", "Etcd", "Network", "Proxies", "in_threads", "tell"]

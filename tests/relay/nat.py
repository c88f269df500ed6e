"""Hosts in network namespaces behind NATs of several kinds, and the internet between them: nftables plays the NATs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Self

from tests.wan import namespace
from wancoll.testing.network import Host

PORT = 7600  # of all daemons: what a full cone forwards
_INTERNET = "203.0.113"
_LAN, _INNER_LAN = "192.168.0", "192.168.1"  # of each router: hosts of two LANs may have one address

# open: no NAT. cone: whoever connects to the router's PORT comes through. restricted: only answers come through, from
# where a packet was sent to. symmetric: the same, and each connection has another port outside. Routers drop the rest.
Kind = str
KINDS = ("open", "cone", "restricted", "symmetric")


def why_not() -> str:
    """Why this machine can have no Nats, "" if it can."""
    if os.geteuid() or not all(map(shutil.which, ("nft", "ip"))):
        return "needs root, nft and ip"
    return ""


class Nats:
    """The internet with a master, and a host for each of *kinds*; "=N" is one more host in the LAN of host N.

    "/N" has a restricted router of its own in that LAN.

    Nothing has a name that could be left behind: the kernel removes all when the last process in it has ended.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._stack = ExitStack()
        self._hosts: dict[Host, int] = {}  # descriptors of namespaces
        self._addresses: dict[Host, str] = {}
        self.public: dict[Host, str] = {}
        try:
            self._internet = self._new()
            self._run(self._internet, "ip link add br0 type bridge", "ip link set br0 up")
            self._run(self._internet, "sysctl -qw net.bridge.bridge-nf-call-iptables=0", check=False)
            self._open("master", f"{_INTERNET}.1")
            routers: dict[int, int] = {}
            for i, kind in enumerate(kinds):
                outside = f"{_INTERNET}.{10 + i}"
                if kind == "open":
                    self._open(i, outside)
                elif kind.startswith("="):
                    at = int(kind[1:])
                    self._inside(i, routers[at], f"{_LAN}.{2 + i}", self.public[at])
                elif kind.startswith("/"):
                    at, inner = int(kind[1:]), self._new()
                    self._join(inner, "ext0", routers[at], f"{_LAN}.{2 + i}", f"{_LAN}.1")
                    self._route(inner, "restricted", _INNER_LAN)
                    self._inside(i, inner, f"{_INNER_LAN}.{2 + i}", self.public[at])
                else:
                    routers[i] = self._new()
                    self._plug(routers[i], outside)
                    self._route(routers[i], kind, _LAN)
                    self._inside(i, routers[i], f"{_LAN}.2", outside)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the namespaces."""
        self._stack.close()

    def address(self, host: Host) -> str:
        """See Network."""
        return self._addresses[host]

    def inside(self, host: Host) -> AbstractContextManager[None]:
        """See Network."""
        return namespace.inside(self._hosts[host])

    def add_open(self, host: Host, last: int) -> str:
        """One more open host; its address."""
        self._open(host, f"{_INTERNET}.{last}")
        return self._addresses[host]

    def _new(self) -> int:
        made = namespace.in_new_namespace(namespace.own_namespace)
        self._stack.callback(os.close, made)
        self._run(made, "ip link set lo up")
        return made

    def _open(self, host: Host, address: str) -> None:
        made = self._new()
        self._plug(made, address)
        self._run(made, f"ip route add default via {_INTERNET}.254", check=False)
        self._hosts[host], self._addresses[host], self.public[host] = made, address, address

    def _plug(self, made: int, address: str) -> None:
        """Join a namespace to the internet, with this address."""
        port = f"p{address.rpartition('.')[2]}"
        self._run(self._internet, f"ip link add {port} type veth peer name ext0 netns /proc/{os.getpid()}/fd/{made}")
        self._run(self._internet, f"ip link set {port} master br0 up")
        self._run(made, f"ip addr add {address}/24 dev ext0", "ip link set ext0 up")

    def _route(self, made: int, kind: Kind, lan: str) -> None:
        """Make a namespace the router of a LAN."""
        self._run(made, "ip link add lan0 type bridge", f"ip addr add {lan}.1/24 dev lan0", "ip link set lan0 up")
        self._run(made, "sysctl -qw net.ipv4.ip_forward=1")
        fully = " fully-random" if kind == "symmetric" else ""
        forwarded = f"iifname ext0 tcp dport {PORT} dnat to {lan}.2:{PORT}" if kind == "cone" else ""
        rules = f"""
            table ip nat {{
                chain before {{ type nat hook prerouting priority -100; {forwarded}; }}
                chain after {{ type nat hook postrouting priority 100; oifname ext0 masquerade{fully}; }}
            }}
            table ip filter {{
                chain in {{ type filter hook input priority 0; policy drop; ct state established,related accept
                    iifname lan0 accept; }}
                chain through {{ type filter hook forward priority 0; policy drop; ct state established,related accept
                    iifname lan0 accept; ct status dnat accept; }}
            }}"""
        with namespace.inside(made):
            subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True, timeout=30)

    def _join(self, made: int, port: str, router: int, address: str, gateway: str) -> None:
        """Join a namespace to a router's LAN, by its *port*."""
        there = f"h{address.rpartition('.')[2]}"
        self._run(router, f"ip link add {there} type veth peer name {port} netns /proc/{os.getpid()}/fd/{made}")
        self._run(router, f"ip link set {there} master lan0 up")
        up = f"ip addr add {address}/24 dev {port}", f"ip link set {port} up", f"ip route add default via {gateway}"
        self._run(made, *up)

    def _inside(self, host: int, router: int, address: str, outside: str) -> None:
        made = self._new()
        self._join(made, "eth0", router, address, f"{address.rpartition('.')[0]}.1")
        self._hosts[host], self._addresses[host], self.public[host] = made, address, outside

    def _run(self, where: int, *commands: str, check: bool = True) -> None:
        with namespace.inside(where):
            for command in commands:
                subprocess.run(command.split(), check=check, timeout=30, capture_output=True)

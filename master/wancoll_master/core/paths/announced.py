"""Whether a daemon may announce that its lanes are dialled there: members dial what is announced. Pure.

Whoever joins tells others where to connect to, and is told whether they could. So that nobody scans ports through the
members, a verified daemon announces the address that its own connection comes from. Others, as behind a port
forwarding, only within networks that the master's operator has named.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence

from msgspec.structs import replace

from wancoll.errors import ConfigError, ProtocolError
from wancoll.local import join_address, split_address
from wancoll.wire import messages as m

ANY = "any"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def check(addresses: Sequence[str], source: str, allowed: Sequence[str] = ()) -> None:
    """Raise ProtocolError unless each address is "host:port" and this daemon's own.

    Its own are *source*, where its connection comes from ("": not looked at), and all in the *allowed* networks.
    """
    for address in addresses:
        try:
            host, port = split_address(address)
        except ConfigError:
            host, port = "", 0
        if not host or not port:
            raise ProtocolError(
                "cannot be dialled at its address", expected="host:port, IPv6 in brackets: [::1]:7400",
                got=repr(address), hint="give its daemon --advertise HOST:PORT",
            )  # fmt: skip
        if source and not _is_its_own(host, source, allowed):
            raise ProtocolError(
                "announces an address that is not its own",
                expected=f"{source}, where it connects from{', or ' if allowed else ''}{', '.join(allowed)}",
                got=address,
                hint=f"behind NAT start its daemon with --advertise {join_address(source, port)} (`wancoll peer`, or "
                "connect(peer_options=[...]) of a process that starts its own); or the master with --announce NETWORK "
                "for addresses that daemons may announce beside",
            )


def settled(hello: m.Hello, source: str, allowed: Sequence[str] = ()) -> m.Hello:
    """What a daemon behind a NAT means, whose connection comes from *source* ("": not looked at).

    Its own addresses are hints for those beside it. To others it is at *source*, in case its port is forwarded.
    """
    hints = [one for one in hello.hints if source and _is_local(one, source)]
    addresses = list(hello.addresses)
    if hints and addresses == hello.hints:  # it was not told what to announce
        ports = [port for host, port in map(split_address, hints) if not _is_its_own(host, source, allowed)]
        addresses = [join_address(source, port) for port in ports] or addresses
    return replace(hello, addresses=addresses, hints=hints)


def _is_local(address: str, source: str) -> bool:
    """Whether it is one of a network of its own, and not *source* itself: no name, and nothing that all can dial."""
    try:
        host, port = split_address(address)
    except ConfigError:
        return False
    found = _read(host)
    return found is not None and port > 0 and not found.is_global and found != _read(source)


def is_name(address: str) -> bool:
    """Whether it has to be looked up; members are told what was found."""
    with contextlib.suppress(ConfigError):
        host, _ = split_address(address)
        return bool(host) and _read(host) is None
    return False


def networks(texts: Sequence[str]) -> list[Network]:
    """What an operator allows, read. Raises ConfigError: one is no network."""
    try:
        return [ipaddress.ip_network(text) for text in texts if text != ANY]
    except ValueError as bad:
        raise ConfigError(
            "--announce cannot be read", expected="networks such as 10.0.0.0/8 or 2001:db8::/32, or any", got=str(bad)
        ) from bad


def _is_its_own(host: str, source: str, allowed: Sequence[str]) -> bool:
    if ANY in allowed:
        return True
    here, there = _read(source), _read(host)
    if here is None or there is None:  # a name: is_name() comes first
        return False
    return here == there or any(there in network for network in networks(allowed))


def _read(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address; None: it is a name, as all with a zone that are not of one link, which others would look up."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    if found.scope_id and not found.is_link_local:
        return None
    return found.ipv4_mapped or ipaddress.IPv6Address(int(found))

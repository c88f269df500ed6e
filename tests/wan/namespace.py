"""Network namespaces without names: made, entered and given a TUN device with system calls alone."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCSIFTXQLEN = 0x8916, 0x891C, 0x8922, 0x8943
IFF_UP = 0x1
QUEUE_PACKETS = 8192  # in the device, until the delay line reads them: it must not lose any
TUN = "/dev/net/tun"

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def own_namespace() -> int:
    """A file descriptor of the calling thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """While entered, the calling thread is in that network namespace; what it starts stays there."""
    before = own_namespace()
    try:
        _call("setns", namespace, CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", before, CLONE_NEWNET)
    finally:
        os.close(before)


def enter(namespace: int) -> None:
    """Move the calling thread to that network namespace, for good."""
    _call("setns", namespace, CLONE_NEWNET)


def in_new_namespace(do: Callable[[], T]) -> T:
    """What *do* returns, called in a new namespace, which lasts as long as a file descriptor or process of it."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            _call("unshare", CLONE_NEWNET)
            result.append(do())
        except BaseException as bad:
            failure.append(bad)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def make_host(
    device: str, address: str, *, mtu: int, segmentation_offload: bool, sysctls: Mapping[str, Any]
) -> tuple[int, int]:
    """A namespace that has loopback and a TUN device with *address* in a /24.

    Returns:
        File descriptors of the device and of the namespace. Both vanish when the last one is closed and the last
        process in the namespace has ended.
    """

    def make() -> tuple[int, int]:
        set_sysctls({"net.ipv6.conf.all.disable_ipv6": 1, "net.ipv6.conf.default.disable_ipv6": 1}, required=False)
        set_sysctls(sysctls)
        return make_device(device, address, mtu=mtu, segmentation_offload=segmentation_offload), own_namespace()

    return in_new_namespace(make)


def make_device(device: str, address: str, *, mtu: int, segmentation_offload: bool) -> int:
    """A TUN device in the calling thread's namespace, with *address* in a /24: its file descriptor."""
    tun = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | (TUN_F_TSO4 if segmentation_offload else 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _configure(control, device, address, mtu)
    except BaseException:
        os.close(tun)
        raise
    return tun


def set_sysctls(values: Mapping[str, Any], *, required: bool = True) -> None:
    """Set kernel settings by name ("net.ipv4.tcp_congestion_control") in the calling thread's namespace."""
    for name, value in values.items():
        try:
            with open("/proc/sys/" + name.replace(".", "/"), "w") as setting:
                setting.write(str(value))
        except FileNotFoundError:
            if required:
                raise


def _configure(control: socket.socket, device: str, address: str, mtu: int) -> None:
    def ioctl(request: int, name: str, value: bytes) -> bytes:
        return fcntl.ioctl(control, request, struct.pack("16s24s", name.encode(), value))

    def ipv4(text: str) -> bytes:
        return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text))

    ioctl(SIOCSIFADDR, device, ipv4(address))
    ioctl(SIOCSIFNETMASK, device, ipv4("255.255.255.0"))
    ioctl(SIOCSIFMTU, device, struct.pack("i", mtu))
    ioctl(SIOCSIFTXQLEN, device, struct.pack("i", QUEUE_PACKETS))
    for name in ("lo", device):
        (flags,) = struct.unpack_from("H", ioctl(SIOCGIFFLAGS, name, b""), 16)
        ioctl(SIOCSIFFLAGS, name, struct.pack("H", flags | IFF_UP))

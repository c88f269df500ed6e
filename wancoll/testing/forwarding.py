"""The process of `Proxies`: forwards lanes to daemons' data ports, and breaks them by rules. A trio shell."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import trio

from wancoll.errors import ProtocolError
from wancoll.net.dial import DialFailed, read_frame
from wancoll.testing.owners import GONE, Owners
from wancoll.wire import messages as m
from wancoll.wire.framing import begins_tls, encode

_CHUNK = 256 * 1024
_LEAST_ATTACKED = 4096  # bytes that are forwarded at once
_QUEUE = 64  # chunks on their way through a delay
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_PORT_TRIES = 20
_SLICE = 0.02  # seconds of a slow lane's bytes that are forwarded at once


@dataclass(slots=True, eq=False)
class Rule:
    """What happens to some lanes, until it is cleared; see Proxies.add."""

    id: int
    kind: str
    source: int
    to: int
    lane: int
    amount: float
    at: float
    sends: bool | None
    fired: bool = False
    gone: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True, eq=False)
class Lane:
    """One forwarded connection."""

    dialler: int  # index of the daemon that dialled, -1: none of those, or it is no lane
    target: int  # index of the daemon that was dialled
    number: int  # of the lane; of one over TLS the least that no other one of these two has
    born: int  # rules that there had been when it was dialled
    sends: bool | None = None  # whether it is for sends and recvs; over TLS nobody knows
    sealed: bool = False  # it is over TLS


class Proxy:
    """Forwards lanes and breaks them by rules. Rules are looked up for every piece that is forwarded."""

    attacks: tuple[str, ...] = ("flip",)  # kinds of rules that change bytes

    def __init__(self, pipe: Connection, targets: list[tuple[str, int]]) -> None:
        self._pipe, self._targets, self._owners = pipe, targets, Owners(targets)
        self._newest = 0  # rule
        self._sealed: list[Lane] = []  # that there are now
        self._rules: dict[int, Rule] = {}
        self._changed = trio.Event()

    async def obey(self) -> None:
        """Carry out what Proxies says, until it is gone."""
        while True:
            await trio.lowlevel.wait_readable(self._pipe.fileno())
            try:
                order, value = self._pipe.recv()  # it is there, and short
            except (EOFError, ConnectionResetError):
                return
            if order == "rule":
                rule = Rule(*value)
                self._rules[rule.id], self._newest = rule, rule.id
            else:
                for number in [*self._rules] if order == "clear all" else [value]:
                    if (cleared := self._rules.pop(number, None)) is not None:
                        cleared.gone.set()
            self._changed.set()
            self._changed = trio.Event()
            if order == "rule":
                await _others_run()
                self._pipe.send(-value[0])  # it holds

    async def accept(self, index: int, stream: trio.SocketStream) -> None:
        """Forward one connection to daemon *index*."""
        near = stream.socket
        lane = None
        try:
            hello, lane = await self._first(near, index)
            if lane is None:
                return
            while (rule := self._rule(lane, inward=True, kinds=("oneway",))) is not None:  # its dials get no answer
                self._fire(rule)
                await rule.gone.wait()
            if (rule := self._rule(lane, inward=True, kinds=("refuse",))) is not None:
                self._fire(rule)
                return
            host, port = self._targets[index]
            far = trio.socket.from_stdlib_socket(socket.socket())
            try:
                await far.connect((host, port))
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with trio.open_nursery() as nursery:
                    for inward, source in ((True, near), (False, far)):
                        nursery.start_soon(self._drop_while_cut, lane, inward, source)
                        nursery.start_soon(self._end_when_reset, lane, inward, nursery.cancel_scope)
                    await _others_run()  # nobody can answer before that
                    try:
                        await _send(far, hello)
                    except OSError:  # the daemon has just died; out of a nursery it would come as a group
                        nursery.cancel_scope.cancel()
                    nursery.start_soon(self._pump, lane, True, near, far, nursery.cancel_scope)
                    nursery.start_soon(self._pump, lane, False, far, near, nursery.cancel_scope)
            finally:
                far.close()
        except (OSError, ProtocolError, DialFailed, trio.ClosedResourceError):
            pass
        finally:
            near.close()
            if lane is not None and lane.sealed:
                self._sealed.remove(lane)

    async def _first(self, near: Any, index: int) -> tuple[bytes, Lane | None]:
        """The dialler's first frame, if it is in clear, and its lane; None: the dialler has closed the connection.

        No rule is known to hold for a lane whose dialler has gone: forwarded, it would get past a firewall.
        """
        if begins_tls(await near.recv(1, socket.MSG_PEEK)):
            dialler = self._owners.dialler(near.getsockname(), near.getpeername())
            if dialler == GONE:
                return b"", None
            taken = {lane.number for lane in self._sealed if (lane.dialler, lane.target) == (dialler, index)}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            self._sealed.append(Lane(dialler, index, number, self._newest, sealed=True))
            return b"", self._sealed[-1]
        hello = await read_frame(near, m.LaneFirst, who="dialler")
        if not isinstance(hello, m.LaneHello):
            return encode(hello), Lane(-1, index, 0, 0)
        dialler = self._owners.dialler(near.getsockname(), near.getpeername())
        if dialler == GONE:
            return b"", None
        return encode(hello), Lane(dialler, index, hello.lane, self._newest, hello.channel == 1)

    def _rule(self, lane: Lane, *, inward: bool, kinds: tuple[str, ...]) -> Rule | None:
        source, to = (lane.dialler, lane.target) if inward else (lane.target, lane.dialler)
        for rule in self._rules.values():
            met = rule.kind in kinds and rule.source in (-1, source) and rule.to in (-1, to)
            met = met and rule.lane in (-1, lane.number)
            met = met and rule.sends in (None, lane.sends)
            if met and (rule.kind not in ("freeze", "reset") or lane.born < rule.id):
                return rule
        return None

    def _fire(self, rule: Rule) -> None:
        if not rule.fired:
            rule.fired = True
            self._pipe.send(rule.id)  # two short messages a rule: there is room

    async def _pump(self, lane: Lane, inward: bool, source: Any, to: Any, scope: trio.CancelScope) -> None:
        """Forward one direction until it ends; then the connection ends, unless the other direction goes on."""
        put, get = trio.open_memory_channel[tuple[float, bytes]](_QUEUE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deliver, lane, inward, get, to, scope)
            try:
                while data := await self._receive(lane, inward, source):
                    delay = self._rule(lane, inward=inward, kinds=("delay",))
                    due = 0.0
                    if delay is not None:
                        self._fire(delay)
                        due = trio.current_time() + delay.amount
                    await put.send((due, data))
            except OSError:
                scope.cancel()  # reset: so is the other half
            put.close()
            await trio.sleep_forever()

    async def _receive(self, lane: Lane, inward: bool, source: Any) -> bytes:
        await trio.lowlevel.wait_readable(source)
        while (rule := self._rule(lane, inward=inward, kinds=("freeze",))) is not None:
            self._fire(rule)
            await rule.gone.wait()
        data: bytes = await source.recv(_CHUNK)
        return data

    async def _deliver(
        self,
        lane: Lane,
        inward: bool,
        get: trio.MemoryReceiveChannel[tuple[float, bytes]],
        to: Any,
        scope: trio.CancelScope,
    ) -> None:
        try:
            async for due, data in get:
                if due:
                    await trio.sleep_until(due)
                if (cut := self._rule(lane, inward=inward, kinds=("truncate",))) is not None:
                    cut.amount -= len(data)
                    if cut.amount < 0:
                        await _send(to, data[: int(cut.amount + len(data)) + 1])
                        self._once(cut)
                        break
                attack = self._rule(lane, inward=inward, kinds=self.attacks)
                if attack is not None and len(data) > _LEAST_ATTACKED:
                    changed = self.attacked(lane, attack, data)
                    if changed != data:
                        data = changed
                        self._once(attack)
                await self._send_slowly(lane, inward, to, data)
        except OSError:
            pass
        scope.cancel()

    def attacked(self, lane: Lane, attack: Rule, data: bytes) -> bytes:
        """*data*, forwarded at once, after the *attack*; as it was if that cannot be done to it."""
        at = int(attack.at * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    def _once(self, rule: Rule) -> None:
        self._rules.pop(rule.id, None)
        self._fire(rule)

    async def _send_slowly(self, lane: Lane, inward: bool, to: Any, data: bytes) -> None:
        view = memoryview(data)
        while view:
            slow = self._rule(lane, inward=inward, kinds=("slow",))
            if slow is None:
                await _send(to, view)
                return
            self._fire(slow)
            piece = max(1, int(slow.amount * _SLICE))
            await _send(to, view[:piece])
            view = view[piece:]
            await trio.sleep(_SLICE)

    async def _end_when_reset(self, lane: Lane, inward: bool, scope: trio.CancelScope) -> None:
        """End the connection at once where a rule says so, as a router does that forgets all that it had."""
        while (rule := self._rule(lane, inward=inward, kinds=("reset",))) is None:
            await self._changed.wait()
        self._fire(rule)
        scope.cancel()

    async def _drop_while_cut(self, lane: Lane, inward: bool, source: Any) -> None:
        """While *source* is cut off the kernel drops its packets unseen, as a cut line does, acknowledgements too."""
        while True:
            changed = self._changed
            rule = self._rule(lane, inward=inward, kinds=("oneway",))
            if rule is None:
                await changed.wait()
                continue
            self._fire(rule)
            _drop_all(source)
            try:
                await rule.gone.wait()
            finally:
                with contextlib.suppress(OSError):
                    source.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


async def _others_run() -> None:
    """Return when every task that can go on has done so, in whatever order they take turns."""
    for _ in range(2):
        await trio.lowlevel.checkpoint()


def _drop_all(sock: Any) -> None:
    """A socket filter that takes nothing: a classic BPF program of one instruction, return 0."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


async def _send(to: Any, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[await to.send(view) :]


def _listen_all(hosts: list[str]) -> list[socket.socket]:
    """A listener on each host, all with the same port."""
    for attempt in range(_PORT_TRIES):
        sockets: list[socket.socket] = []
        try:
            for host in hosts:
                port = sockets[0].getsockname()[1] if sockets else 0
                sockets.append(socket.create_server((host, port), backlog=512))
            return sockets
        except OSError:
            for one in sockets:
                one.close()
            if attempt == _PORT_TRIES - 1:
                raise
    raise AssertionError


async def _main(proxy: Proxy, pipe: Connection, hosts: list[str]) -> None:
    sockets = _listen_all(hosts)
    async with trio.open_nursery() as nursery:
        for index, sock in enumerate(sockets):
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
            nursery.start_soon(trio.serve_listeners, partial(proxy.accept, index), [listener])
        pipe.send(sockets[0].getsockname()[1])
        await proxy.obey()
        nursery.cancel_scope.cancel()


def forward(pipe: Connection, hosts: list[str], targets: list[tuple[str, int]], kind: type[Proxy] = Proxy) -> None:
    """Listen on one port of all hosts, which is said first; obey the pipe's other end until it is closed."""
    with contextlib.suppress(PermissionError):
        os.nice(-5)  # all lanes go through this one process
    trio.run(_main, kind(pipe, targets), pipe, hosts)

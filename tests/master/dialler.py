"""A secure master, and whoever dials it: over TLS, with a key, a proof of it that may be wrong, and what follows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import trio

from tests.master.test_master import PATIENT, Peer, hello
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import split_address
from wancoll.net.proof import Proof
from wancoll.net.tls import server_name, to_dial
from wancoll.trust.keys import Key, shown
from wancoll.trust.token import Token, parse
from wancoll.wire import messages as m
from wancoll_master.config import MasterConfig
from wancoll_master.serve import serve


class Dialled(Peer):
    """A connection over TLS, and the key that the master has shown. Nothing is said on it."""

    def __init__(self, stream: Any, master: bytes) -> None:
        super().__init__(stream)
        self.master = master
        self.nonce = b""

    async def challenged(self) -> bytes:
        """The challenge, which comes first."""
        self.nonce = self.nonce or (await self.expect(m.Challenge)).nonce
        return self.nonce

    async def prove(self, proof: Proof, message: Any, **wrong: Any) -> None:
        """Say *message*, signed, but for what is *wrong* in it."""
        signed = proof.first(self.master, await self.challenged(), message)
        await self.say(msgspec.structs.replace(signed, **wrong))

    async def end(self) -> str:
        """The reason of the master's Bye, which comes before the end."""
        bye = await self.expect(m.Bye)
        assert isinstance(bye, m.Bye)
        return bye.reason


class Master:
    """A master with keys, and its folder."""

    def __init__(self, address: str, folder: Path, token: str) -> None:
        self.address, self.folder = address, folder
        self.token = parse(token) if token else None

    @property
    def keys(self) -> list[str]:
        """Its public keys, as commands on its machine find them."""
        return (self.folder / "state" / "master.pub").read_text().split()

    @property
    def admin(self) -> Proof:
        """What commands on its machine prove themselves with."""
        return Proof(Key.read(str(self.folder / "state" / "admin.key")), ())

    @contextlib.asynccontextmanager
    async def dial(self, *, name: str = "", version: str = f"wancoll/{PROTOCOL_VERSION}") -> AsyncIterator[Dialled]:
        """A connection that asks for the key of this *name* in TLS; "": for the newest."""
        context, (host, port) = to_dial(), split_address(self.address)
        context.set_alpn_protocols([version] if version else [])
        asked = name or server_name(bytes.fromhex(self.keys[-1]))
        stream: Any = trio.SSLStream(await trio.open_tcp_stream(host, port), context, server_hostname=asked)
        try:
            await stream.do_handshake()
            yield Dialled(stream, shown(stream.getpeercert(binary_form=True)))
        finally:
            await trio.aclose_forcefully(stream)

    async def ask(self, proof: Proof, message: Any, kind: Any = m.FromMaster, **wrong: Any) -> Any:
        """The first answer of this *kind* to a message that is signed, but for what is *wrong*."""
        async with self.dial() as dialled:
            await dialled.prove(proof, message, **wrong)
            return await dialled.expect(kind)

    async def refused(self, proof: Proof, message: Any, **wrong: Any) -> str:
        """Why it is sent away for good."""
        answer = await self.ask(proof, message, m.Welcome | m.Bye | m.Status, **wrong)
        assert isinstance(answer, m.Bye), answer
        assert answer.final
        return answer.reason

    async def do(self, message: Any) -> Any:
        """The answer to an admin, which is no refusal."""
        answer = await self.ask(self.admin, message, m.Tokens | m.KeysAre | m.Bye)
        assert not isinstance(answer, m.Bye), answer.reason
        assert answer.refused == ""
        return answer

    async def make(self, **more: Any) -> Token:
        """A new token."""
        asked = {"role": "peer", "name": "", "groups": [], "uses": 0, "seconds": 3600.0, **more}
        return parse((await self.do(m.MakeToken(PROTOCOL_VERSION, **asked))).made)

    async def join(self, name: str, token: Token | None = None, key: Key | None = None) -> tuple[Proof, m.Admitted]:
        """A daemon that was admitted, and what it was told."""
        shown = (token or self.token or await self.make()).shown
        proof = Proof(key or Key.new(), (), b"", name, shown)
        admitted = await self.ask(proof, hello(name), m.Admitted)
        return Proof(proof.key, (), admitted.receipt, name), admitted


@contextlib.asynccontextmanager
async def secure(folder: Path, **config: Any) -> AsyncIterator[Master]:
    """A running one."""
    tokens: list[str] = []
    more = {"secure": True, "state": str(folder / "state"), "journal": str(folder / "journal"), "limits": PATIENT}
    async with trio.open_nursery() as nursery:
        found = MasterConfig(**{"listen": "127.0.0.1:0", "first": True, **more, **config})
        (address, *_) = await nursery.start(serve, found, tokens.append)
        with trio.fail_after(50):
            yield Master(address, folder, tokens[0] if tokens else "")
        nursery.cancel_scope.cancel()

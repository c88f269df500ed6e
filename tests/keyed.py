"""Keys for tests: tokens of a master, wallets of those whom it has admitted, and what a stranger shows."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from wancoll.net.proof import make_receipt
from wancoll.net.wallet import Wallet
from wancoll.trust.folder import in_memory
from wancoll.trust.identity import Identity, Role
from wancoll.trust.keys import Key
from wancoll.trust.token import Token
from wancoll.wire import messages as m

SECRET = "s" * 43
TOKEN = "k3v9"


def token_of(master: Key, address: str = "h:1") -> Token:
    """One that names this key."""
    return Token(master.public, TOKEN, SECRET, address)


def admit(wallet: Wallet, name: str, *masters: Key, role: Role = "peer", groups: tuple[str, ...] = ()) -> None:
    """Give it a receipt as all these do, of one master."""
    who = Identity(name, role, groups, TOKEN, wallet.key.public)
    wallet.keep(m.Admitted(make_receipt(masters, who), [one.public for one in masters]))


def admitted(folder: Path, name: str, master: Key, role: Role = "peer") -> Wallet:
    """A new one of *name*, with a receipt."""
    wallet = Wallet(str(folder / name), token_of(master))
    admit(wallet, name, master, role=role)
    return wallet


def showing(certificates: Sequence[bytes], key: bytes) -> ssl.SSLContext:
    """An acceptor's that shows these."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with in_memory(b"".join(certificates) + key) as file:
        context.load_cert_chain(file)
    return context

"""A folder with a key, the receipt for it, and the keys of the masters that gave it: a daemon's, or a command's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from wancoll.errors import ConfigError, ProtocolError
from wancoll.net.proof import Proof
from wancoll.trust.folder import held_folder, own_folder, write_secret
from wancoll.trust.keys import Key
from wancoll.trust.token import Token
from wancoll.wire import messages as m
from wancoll.wire.framing import decode_body, encode_body

_KEY, _ADMITTED = "key", "admitted"


@dataclass
class Wallet:
    """A key and what proves it to masters and other daemons. Both are read once.

    Args:
        folder: for this user alone; made.
        token: to be admitted with; None: a receipt has to be there.
    """

    folder: str
    token: Token | None

    @cached_property
    def key(self) -> Key:
        """The key, which is made where there is none.

        Raises:
            ConfigError: it cannot be read, or written.
        """
        try:
            own_folder(self.folder)
            return Key.read_or_make(self._path(_KEY))
        except OSError as bad:
            raise self._unwritable(bad) from bad

    @property
    def masters(self) -> list[bytes]:
        """Public keys of which the master has to prove one, the newest last: told by a master, or the token's."""
        if (admitted := self._admitted) is not None:
            return list(admitted.keys)
        return [self.token.master] if self.token is not None else []

    @property
    def receipt(self) -> bytes:
        """The receipt for this key; b"": there is none."""
        return admitted.receipt if (admitted := self._admitted) is not None else b""

    @property
    def name(self) -> str:
        """The name in the receipt; "": there is none."""
        return decode_body(self.receipt, m.KeyReceipt).name if self.receipt else ""

    @cached_property
    def _admitted(self) -> m.Admitted | None:
        """What a master has told; None: nothing, or it is damaged, or of another token's master."""
        with contextlib.suppress(FileNotFoundError, ProtocolError), open(self._path(_ADMITTED), "rb") as file:
            found: m.Admitted = decode_body(file.read(), m.Admitted)
            receipt = self._own(found)
            mine = self.token is None or self.token.master in found.keys or self.token.id == receipt.token
            return found if mine else None
        return None

    def _own(self, admitted: m.Admitted) -> m.KeyReceipt:
        receipt: m.KeyReceipt = decode_body(admitted.receipt, m.KeyReceipt)
        if receipt.key != self.key.public:
            raise ProtocolError("is a receipt for another key", who="the master", got=receipt.key.hex())
        return receipt

    def keep(self, admitted: m.Admitted) -> None:
        """Show this receipt, and believe these keys, from now on.

        Raises:
            ProtocolError: it is no receipt for this key.
            OSError: it cannot be written: after the next start it is not known.
        """
        self._own(admitted)
        self._admitted = admitted
        write_secret(self._path(_ADMITTED), encode_body(admitted))

    def proof(self, name: str = "") -> Proof:
        """What proves this key to a master. *name*: that it wants to be admitted by."""
        token = self.token.shown if self.token is not None else ""
        return Proof(self.key, tuple(self.masters), self.receipt, name or self.name, token)

    @contextlib.contextmanager
    def held(self, owner: str, wait: float = 0.0) -> Iterator[None]:
        """The folder is one daemon's, or command's, for as long; *owner* says which to another one that wants it.

        Raises:
            ConfigError: another one has it for *wait* seconds, or it cannot be written to.
        """
        with contextlib.ExitStack() as holding:
            try:
                holding.enter_context(held_folder(self.folder, "daemon", owner, wait))
            except OSError as bad:
                raise self._unwritable(bad) from bad
            yield

    def _unwritable(self, bad: OSError) -> ConfigError:
        return ConfigError("cannot be written to", who=self.folder, got=str(bad), hint="choose another --state")

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

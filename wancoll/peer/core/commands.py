"""What a member tells its shell to do, and the shell carries out in order and without waiting. Pure.

What it wishes of its links (links.Wish) goes to them as it is. Leave is the last command but those that end its ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from wancoll.peer.core import links
from wancoll.peer.core.op import Op
from wancoll.wire import messages as m


class ToMaster(Struct, frozen=True):
    """Send to the master."""

    message: m.FromPeer


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send to the client; *of*: the op whose outcome it is."""

    message: m.FromDaemon
    of: Op | None = field(default=None, compare=False)


class SendNote(Struct, frozen=True):
    """Send the note to these members (mids), perhaps *again*; dropped where the link to one is not up."""

    mids: tuple[int, ...]
    note: bytes
    again: bool = False


class StartOp(Struct, frozen=True):
    """Hand the op to the engine under op.engine_id, as op.resolved says; answered by op_finished or op_cancelled.

    If it has op.hearers the engine may say op.vote to them, with the digest, the moment it has finished: op_finished
    tells whether it has.

    *beside*: it is finished here, and runs for others' sake: its result goes to memory of its own (op.beside).
    """

    op: Op
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The engine has told the client by itself that the op is committed: for those who count."""

    result: m.Result
    of: Op


class HandOver(Struct, frozen=True):
    """The late client has called what its daemon took part in: copy the result from op.memory to the client's back."""

    op: Op


class CancelOp(Struct, frozen=True):
    """Take an attempt out of the engine; answered by op_cancelled."""

    engine_id: int


Command = ToMaster | ToClient | links.Wish | SendNote | StartOp | Committed | HandOver | CancelOp

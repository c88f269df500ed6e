"""The live page: a small site for browsers that is told anew what has changed. A trio shell.

What is shown is made once for all viewers, while there are any; a viewer that is behind gets the newest, not all that
was. One that does not read is cut off.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from importlib import resources

import msgspec
import trio

from wancoll.net.http import Answer, Port, Request, Send, refused
from wancoll_master.core.views.page import Section

MOST_VIEWERS = 32
_LOOK = 0.5  # seconds between looks
_SHARE = 0.05  # of the event loop's time that goes into looks at most
_QUIET = 10.0  # seconds without news, until a viewer is told that there are none

_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


class Page:
    """Serves the live page to who shows the *token*, as password or bearer; "": to all, under a name of loopback only.

    *look* gives the sections as they are now, each made when it is taken; None is a pause. Who opened the *listeners*
    closes them.
    """

    def __init__(
        self, look: Callable[[], Iterator[Section | None]], listeners: list[socket.socket], token: str = ""
    ) -> None:
        self._source, self._token = look, token.encode()
        self._port = Port("page", listeners, self._answer)
        self._viewers = 0
        self._somebody = trio.Event()  # there is a viewer
        self._sections: dict[str, tuple[int, bytes]] = {}  # by name: the version that changed it, and it as JSON
        self._version, self._news = 0, trio.Event()
        folder = resources.files("wancoll_master") / "static"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    async def serve(self) -> None:
        """Task: answer, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            await self._port.serve()

    async def _answer(self, request: Request) -> Answer:
        if refusal := refused(request, self._token, "WANCOLL_PAGE_TOKEN"):
            return refusal
        if request.path in self._files:
            return Answer(200, *self._files[request.path])
        if request.path != "/events":
            return Answer(404, b"the page is at /\n")
        if self._viewers >= MOST_VIEWERS:
            return Answer(503, f"{MOST_VIEWERS} look already\n".encode(), headers={"Retry-After": "10"})
        return Answer(200, b"", "text/event-stream", stream=self._tell)

    async def _tell(self, send: Send) -> None:
        """Tell a viewer what is new, until it goes."""
        if self._viewers >= MOST_VIEWERS:
            return  # many came at once
        self._viewers += 1
        try:
            await send(b"retry: 1000\n\n")
            self._somebody.set()
            known = 0
            while True:
                news = self._news
                if known == self._version:
                    with trio.move_on_after(_QUIET):
                        await news.wait()
                frame = self._frame(known)
                known = self._version
                await send(frame)
        finally:
            self._viewers -= 1

    # ---- what is told --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look while somebody does."""
        while True:
            await self._somebody.wait()
            took = await self._look()
            await trio.sleep(max(_LOOK, took * (1 / _SHARE - 1)))
            if not self._viewers:
                self._somebody = trio.Event()
                self._sections.clear()
                self._version = 0

    async def _look(self) -> float:
        """What is so now. Returns the seconds that it took."""
        took, began, version = 0.0, trio.current_time(), self._version + 1
        found: dict[str, tuple[int, bytes]] = {}
        for section in self._source():
            if section is not None:
                name, what = section
                said = msgspec.json.encode(what)
                known = self._sections.get(name)
                found[name] = known if known is not None and known[1] == said else (version, said)
            took += trio.current_time() - began
            await trio.lowlevel.checkpoint()
            began = trio.current_time()
        if any(changed == version for changed, _ in found.values()):
            self._sections, self._version = found, version
            self._news.set()
            self._news = trio.Event()
        return took

    def _frame(self, known: int) -> bytes:
        """For a viewer that has version *known*; 0: nothing. The past is told once, and goes on with what is new.

        Without news it says that the master is there.
        """
        changed = (
            msgspec.json.encode(name) + b":" + said
            for name, (version, said) in self._sections.items()
            if version > known and not (known and name.endswith("/history"))
        )
        return b"data: {" + b",".join((b'"at":%.3f' % time.time(), *changed)) + b"}\n\n"

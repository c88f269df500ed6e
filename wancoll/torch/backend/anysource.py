"""Receiving from any rank: a receive is posted to every other one, and what is not needed serves later receives.

A receive cannot be taken back. So each has a buffer of its own, an Early, which stays posted; whoever receives the like
from there next takes it over, from that rank or from any. It is posted ahead: what is sent of another size or dtype
passes it by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from wancoll.client.work import Work
from wancoll.errors import ConfigError
from wancoll.torch.backend.handle import UNSET, Operation
from wancoll.torch.backend.torch_errors import raised
from wancoll.torch.backend.torch_tensors import moved, put_back

Post: TypeAlias = Callable[[int, int, torch.Tensor], Work]  # receives from a rank, with a tag, into a tensor
_Key: TypeAlias = tuple[int, int, int, torch.dtype]  # source, tag, elements and their dtype
_MOST = 1024  # receives that stay posted: each has a buffer


@dataclass(frozen=True, slots=True)
class Early:
    """A receive that is posted, into *x*."""

    key: _Key
    x: torch.Tensor
    work: Work


class Mailbox:
    """What one group has posted for receives from any of the *others*."""

    def __init__(self, others: list[int]) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._early: dict[_Key, Early] = {}
        self._waiting: dict[int, FromAny] = {}  # by tag: the newest that is not done

    def await_any(self, operation: FromAny, tag: int) -> FromAny | None:
        """Remember that *operation* waits; returns the one before it."""
        with self._lock:
            before = self._waiting.get(tag)
            self._waiting[tag] = operation
            return before

    def spread(self, tag: int, tensor: torch.Tensor, post: Post) -> list[Early]:
        """Post what is missing, so that every other rank can send the like of this tensor.

        Raises:
            ConfigError: too much is posted that nobody has sent.
        """
        like = moved(tensor, "recv")
        with self._lock:
            keys = [(source, tag, tensor.numel(), tensor.dtype) for source in self._others]
            missing = [key for key in keys if key not in self._early]
            if len(self._early) + len(missing) > _MOST:
                raise raised(ConfigError(
                    "too many receives are posted, by earlier ones from any source",
                    expected=f"at most {_MOST}: one for each source, tag, size and dtype", got=f"{len(self._early)}",
                    hint="use fewer tags and sizes, or name the source",
                ), "recv")  # fmt: skip
            for key in missing:
                x = torch.empty_like(like)
                self._early[key] = Early(key, x, post(key[0], tag, x))
            return [self._early[key] for key in keys]

    def taken(self, operation: FromAny, tag: int, early: Early | None) -> None:
        """*operation* is done, and has used *early*."""
        with self._lock:
            if early is not None:
                del self._early[early.key]
            if self._waiting.get(tag) is operation:
                del self._waiting[tag]

    def take(self, source: int, tag: int, tensor: torch.Tensor) -> Early | None:
        """For a receive from *source*: what is posted already. Raises ConfigError: somebody waits for it."""
        if not self._early:
            return None
        with self._lock:
            early = self._early.get((source, tag, tensor.numel(), tensor.dtype))
            if early is None:
                return None
            if tag in self._waiting:
                raise raised(ConfigError(
                    "cannot be while a receive from any source with this tag is pending",
                    expected="another tag, or to wait() for that one first", got=f"source {source}, tag {tag}",
                ), "recv")  # fmt: skip
            del self._early[early.key]
            return early


class FromAny(Operation):
    """A receive into *tensor* from any rank. Those with one tag are served in the order of their calls.

    *post* receives from one rank; *given* is what every Operation takes.
    """

    def __init__(self, mailbox: Mailbox, tensor: torch.Tensor, tag: int, post: Post, **given: Any) -> None:
        super().__init__(parts=[], finish=lambda _receipts: None, result=[tensor], **given)
        self._mailbox, self._tensor, self._tag, self._post = mailbox, tensor, tag, post
        self._earlies: list[Early] | None = None
        self._before = mailbox.await_any(self, tag)
        self._begin()

    def _begin(self) -> None:
        if self._before is not None and not self._before.settle():
            return
        self._before = None
        if self._earlies is None:
            try:
                self._earlies = self._mailbox.spread(self._tag, self._tensor, self._post)
            except BaseException:
                self._mailbox.taken(self, self._tag, None)
                raise

    @property
    def finished(self) -> bool:
        """Whether a message is there."""
        return self._settled or any(each.work.finished for each in self._earlies or ())

    def settle(self) -> bool:
        """Post what is left, then settle as Operation does."""
        if self._earlies is None:
            self._begin()
        return super().settle()

    def _run_to_end(self) -> None:
        early = next(each for each in self._earlies or () if each.work.finished)
        self._mailbox.taken(self, self._tag, early)
        early.work.wait()
        put_back(self._tensor, early.x)
        self.source = early.key[0]

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Wait for the receive before this one, then as Operation does."""
        if self._before is not None and not self._settled:
            self._before.wait(timeout)
        self.settle()
        return super().wait(timeout)

    def _calls(self) -> list[Work]:
        return [each.work for each in self._earlies or ()]

"""Receiving from any rank: a receive is posted to every other one, and what is not needed serves later receives.

A receive cannot be taken back. So each has a buffer of its own, an Early, which stays posted under its source and tag;
whoever receives from there next takes it over, from that rank or from any. That is why messages of a tag that was
received from any rank must be of one size and dtype.
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
from wancoll.torch.errors import raised
from wancoll.torch.tensors import moved, put_back
from wancoll.torch.work import UNSET, Operation

Post: TypeAlias = Callable[[int, int, torch.Tensor], Work]  # receives from a rank, with a tag, into a tensor


@dataclass(frozen=True, slots=True)
class Early:
    """A receive that is posted, into *x*."""

    source: int
    x: torch.Tensor
    work: Work


class Mailbox:
    """What one group has posted for receives from any rank.

    Args:
        others: the other ranks.
    """

    def __init__(self, others: list[int]) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._early: dict[tuple[int, int], Early] = {}  # by source and tag
        self._waiting: dict[int, FromAny] = {}  # by tag: the newest that is not done

    def await_any(self, operation: FromAny, tag: int) -> FromAny | None:
        """Remember that *operation* waits; returns the one before it."""
        with self._lock:
            before = self._waiting.get(tag)
            self._waiting[tag] = operation
            return before

    def spread(self, tag: int, like: torch.Tensor, post: Post) -> list[Early]:
        """Post what is missing, so that every other rank can send something *like* this."""
        with self._lock:
            for source in self._others:
                early = self._early.get((source, tag))
                if early is None:
                    x = torch.empty_like(like)
                    self._early[source, tag] = Early(source, x, post(source, tag, x))
                else:
                    _check_like(early, like, tag)
            return [self._early[source, tag] for source in self._others]

    def taken(self, operation: FromAny, tag: int, early: Early | None) -> None:
        """*operation* is done, and has used *early*."""
        with self._lock:
            if early is not None:
                del self._early[early.source, tag]
            if self._waiting.get(tag) is operation:
                del self._waiting[tag]

    def take(self, source: int, tag: int, like: torch.Tensor) -> Early | None:
        """For a receive from *source*: what is posted already.

        Raises:
            ConfigError: it is of another size, or somebody waits for it.
        """
        if not self._early:
            return None
        with self._lock:
            early = self._early.get((source, tag))
            if early is None:
                return None
            if tag in self._waiting:
                raise raised(ConfigError(
                    "cannot be while a receive from any source with this tag is pending",
                    expected="another tag, or to wait() for that one first", got=f"source {source}, tag {tag}",
                ), "recv")  # fmt: skip
            _check_like(early, like, tag)
            del self._early[source, tag]
            return early


def _check_like(early: Early, like: torch.Tensor, tag: int) -> None:
    if early.x.dtype != like.dtype or early.x.numel() != like.numel():
        raise raised(ConfigError(
            "the tensor does not fit a receive that is posted already, by an earlier one from any source",
            expected=f"{early.x.numel()} elements of {early.x.dtype}, as with tag {tag} before",
            got=f"{like.numel()} of {like.dtype}", hint="use a tag for each size",
        ), "recv")  # fmt: skip


class FromAny(Operation):
    """A receive from any rank. Those with one tag are served in the order of their calls.

    Args:
        mailbox: of the group.
        tensor: takes the message.
        tag: of the message.
        post: receives from one rank.
        given: what every Operation takes.
    """

    def __init__(self, mailbox: Mailbox, tensor: torch.Tensor, tag: int, post: Post, **given: Any) -> None:
        super().__init__(parts=[], finish=lambda _receipts: None, result=[tensor], **given)
        self._mailbox, self._tensor, self._tag, self._post = mailbox, tensor, tag, post
        self._like = moved(tensor, "recv")
        self._earlies: list[Early] | None = None
        self._before = mailbox.await_any(self, tag)
        self._begin()

    def _begin(self) -> None:
        if self._before is not None and not self._before.settle():
            return
        self._before = None
        if self._earlies is None:
            try:
                self._earlies = self._mailbox.spread(self._tag, self._like, self._post)
            except BaseException:
                self._mailbox.taken(self, self._tag, None)
                raise

    @property
    def finished(self) -> bool:
        """Whether a message is there."""
        return self._settled or any(each.work.finished for each in self._earlies or ())

    def settle(self) -> bool:
        """As Operation's."""
        if self._earlies is None:
            self._begin()
        return super().settle()

    def _run_to_end(self) -> None:
        early = next(each for each in self._earlies or () if each.work.finished)
        self._mailbox.taken(self, self._tag, early)
        early.work.wait()
        put_back(self._tensor, early.x)
        self.source = early.source

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """As Operation's."""
        if self._before is not None and not self._settled:
            self._before.wait(timeout)
        self.settle()
        return super().wait(timeout)

    def _await(self, left: float | None) -> bool:
        return self._completer.connection.wait_any([each.work for each in self._earlies or ()], left)

    def _pending_part(self) -> Work | None:
        return None if self.finished else next((each.work for each in self._earlies or ()), None)

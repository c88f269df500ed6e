"""etcd's v3 API as far as a lease, a few keys and transactions need it: JSON over HTTP (its gRPC gateway), on trio.

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ and rpc.proto say what is sent: bytes are base64, 64-bit numbers
strings, and fields that are zero are left out of answers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx
import trio

from wancoll.errors import ConfigError

PAGE = 64  # keys of one range request

T = TypeVar("T")


class EtcdError(Exception):
    """No endpoint says that it has carried out a request; one may have, or may do so yet."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value and revisions."""

    key: str
    value: str
    created: int
    modified: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease; *ttl* in seconds is the granted one, not below etcd's smallest."""

    id: str
    ttl: float


@dataclass(frozen=True, slots=True)
class TxnAnswer:
    """Whether all comparisons held, the store's revision, and what the failure branch has read, by request."""

    succeeded: bool
    revision: int
    read: list[Entry | None]


def check_endpoints(text: str) -> list[str]:
    """URLs of etcd's members, "http://host:port,http://host:port", as a list.

    Raises:
        ConfigError: not of that form.
    """
    endpoints = [one.strip().rstrip("/") for one in text.split(",")]
    for one in endpoints:
        try:
            url = httpx.URL(one)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host or url.path != "/" or url.query:
            raise ConfigError("--etcd cannot be read", expected="http://HOST:PORT[,http://HOST:PORT]", got=repr(one))
    return endpoints


class Etcd:
    """A client. An async context manager. Every request raises EtcdError where nobody says what came of it.

    Args:
        endpoints: URLs of the cluster's members; they are tried in turn, from the last one that answered.
        timeout: seconds for each of them to answer.
    """

    def __init__(self, endpoints: Sequence[str], timeout: float) -> None:
        self._endpoints = list(endpoints)
        self.timeout = timeout
        self._at = 0
        # No proxies of the environment: what decides who leads is not to depend on them.
        self._http = httpx.AsyncClient(trust_env=False)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _ask(self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        reasons = []
        for _ in self._endpoints:
            endpoint = self._endpoints[self._at]
            try:
                with trio.fail_after(self.timeout):
                    response = await self._http.post(f"{endpoint}/v3/{path}", json=body, timeout=self.timeout)
                if response.status_code == httpx.codes.OK:
                    return read(response.json())
                reasons.append(f"{endpoint}: {response.status_code} {response.text[:300]}")
            except (trio.TooSlowError, httpx.TimeoutException):
                reasons.append(f"{endpoint}: no answer within {self.timeout:.2g} s")
            except httpx.HTTPError as bad:
                reasons.append(f"{endpoint}: {bad}")
            except (ValueError, KeyError, TypeError, AttributeError) as bad:
                reasons.append(f"{endpoint}: not an answer of etcd ({bad!r})")
            self._at = (self._at + 1) % len(self._endpoints)
        raise EtcdError("; ".join(reasons))

    # ---- leases --------------------------------------------------------------------------------------

    async def grant(self, ttl: int) -> Lease:
        """A new lease of *ttl* seconds."""
        return await self._ask(
            "lease/grant", {"TTL": str(ttl)}, lambda answer: Lease(str(answer["ID"]), float(answer["TTL"]))
        )

    async def keep_alive(self, lease: str) -> float:
        """Renew; returns the seconds that it holds from now on, 0 if there is no such lease any more."""
        return await self._ask("lease/keepalive", {"ID": lease}, lambda answer: float(answer["result"].get("TTL", 0)))

    async def revoke(self, lease: str) -> None:
        """End a lease, and with it its keys."""
        await self._ask("lease/revoke", {"ID": lease}, lambda answer: None)

    # ---- keys ----------------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        """One key, as the majority knows it."""
        return await self._ask("kv/range", {"key": _pack(key)}, _first)

    async def under(self, prefix: str) -> list[Entry]:
        """All keys that begin with *prefix*, in order."""
        found: list[Entry] = []
        start, end = prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)
        while True:
            body = {"key": _pack(start), "range_end": _pack(end), "limit": str(PAGE)}
            page, more = await self._ask("kv/range", body, _page)
            found += page
            if not more or not page:
                return found
            start = found[-1].key + "\0"

    async def txn(self, compare: list[dict[str, Any]], success: list[dict[str, Any]], read: Sequence[str]) -> TxnAnswer:
        """Carry out *success* if all of *compare* holds, else read the keys *read*."""
        failure = [{"request_range": {"key": _pack(key)}} for key in read]
        return await self._ask("kv/txn", {"compare": compare, "success": success, "failure": failure}, _txn_answer)


def created(key: str, revision: int) -> dict[str, Any]:
    """A comparison: *key* was created at that revision; 0: there is none."""
    return {"key": _pack(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def modified(key: str, revision: int) -> dict[str, Any]:
    """A comparison: *key* was changed last at that revision; 0: there is none."""
    return {"key": _pack(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: str, value: str, lease: str = "0") -> dict[str, Any]:
    """A change: *key* gets the value, and ends with the lease."""
    return {"request_put": {"key": _pack(key), "value": _pack(value), "lease": lease}}


def delete(key: str) -> dict[str, Any]:
    """A change: *key* is removed."""
    return {"request_delete_range": {"key": _pack(key)}}


def _pack(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _unpack(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")


def _entry(found: dict[str, Any]) -> Entry:
    value = _unpack(found.get("value", ""))
    return Entry(_unpack(found["key"]), value, int(found["create_revision"]), int(found["mod_revision"]))


def _txn_answer(answer: dict[str, Any]) -> TxnAnswer:
    succeeded = bool(answer.get("succeeded", False))
    responses = [] if succeeded else answer.get("responses", [])
    read = [_first(one["response_range"]) for one in responses]
    return TxnAnswer(succeeded, int(answer["header"]["revision"]), read)


def _page(answer: dict[str, Any]) -> tuple[list[Entry], bool]:
    return [_entry(found) for found in answer.get("kvs", [])], bool(answer.get("more", False))


def _first(answer: dict[str, Any]) -> Entry | None:
    return _entry(answer["kvs"][0]) if answer.get("kvs") else None

"""etcd's v3 API as far as a lease, a few keys and transactions need it: JSON over HTTP (its gRPC gateway), on trio.

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ and rpc.proto say what is sent: bytes are base64, 64-bit numbers
strings, and fields that are zero are left out of answers.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx
import trio

from wancoll.errors import ConfigError
from wancoll_master.config import EtcdConfig

PAGE = 64  # keys of one range request
_MOST_BYTES = 1 << 28  # of all that is read at once: keys, values, and _ENTRY_BYTES for each
_ENTRY_BYTES = 256

T = TypeVar("T")


class EtcdError(Exception):
    """No endpoint says that it has carried out a request; one may have, or may do so yet."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value and revisions, and the lease with which it ends; "": none."""

    key: str
    value: str
    created: int
    modified: int
    lease: str = ""


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


def check_access(config: EtcdConfig) -> None:
    """Check that the settings are good, and belong together. Raises ConfigError: they do not."""
    urls = [httpx.URL(one) for one in check_endpoints(config.endpoints)]
    clear = [one for one in urls if one.scheme != "https"]
    if clear and (config.ca or config.cert):
        raise ConfigError(
            "certificates are of no use over http", who="--etcd-ca and --etcd-cert", expected="https:// in --etcd",
            got=", ".join(map(str, clear)), hint="write https://, or leave them out",
        )  # fmt: skip
    if config.key and not config.cert:
        raise ConfigError("--etcd-key needs --etcd-cert", who="wancoll master", got=config.key)
    if bool(config.user) != bool(config.password):
        raise ConfigError(
            "--etcd-user and WANCOLL_ETCD_PASSWORD belong together", who="wancoll master", expected="both or none",
            got="no password" if config.user else "no user",
            hint="the password is taken from the environment alone, which other users cannot see",
        )  # fmt: skip
    strangers = [str(one) for one in clear if not _is_here(one.host)]
    if config.user and strangers:
        raise ConfigError(
            "a password would go over the network in clear", who="--etcd-user", expected="https:// in --etcd",
            got=", ".join(strangers), hint="let etcd listen with TLS, and name its authority with --etcd-ca",
        )  # fmt: skip
    _context(config)


def _context(config: EtcdConfig) -> ssl.SSLContext:
    """For https. Raises ConfigError: the files cannot be used."""
    try:
        context = ssl.create_default_context(cafile=config.ca or None)
        _load(config, context)
    except (OSError, ValueError) as bad:  # SSLError is an OSError
        raise ConfigError(
            "certificates for etcd cannot be used", who=", ".join(filter(None, (config.ca, config.cert, config.key))),
            expected="PEM files: authorities, a certificate, its key without a password",
            got=str(bad) or type(bad).__name__, hint="see that they belong together and can be read",
        ) from bad  # fmt: skip
    return context


def _load(config: EtcdConfig, context: ssl.SSLContext) -> None:
    """Have this client's certificate in it, as it is now."""
    if config.cert:
        context.load_cert_chain(config.cert, config.key or None, password=_no_password)


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_endpoints(text: str) -> list[str]:
    """URLs of etcd's members, "http://host:port,http://host:port", as a list. Raises ConfigError: not of that form."""
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
    """An async context manager: a client. It tries each endpoint for *timeout* seconds, first the last that answered.

    Every request raises EtcdError where nobody says what came of it.
    """

    def __init__(self, config: EtcdConfig, timeout: float) -> None:
        self._config, self._endpoints = config, check_endpoints(config.endpoints)
        self.timeout = timeout
        self._at = 0
        self.cluster = ""  # its id, as it said last
        self._token = ""  # of the user; etcd forgets it after a while
        self._context = _context(config)
        # No proxies of the environment: what decides who leads is not to depend on them.
        self._http = httpx.AsyncClient(trust_env=False, verify=self._context)

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
                    response = await self._post(endpoint, path, body)
                if response.status_code == httpx.codes.OK:
                    answer = response.json()
                    self.cluster = str(answer.get("header", {}).get("cluster_id", self.cluster))
                    return read(answer)
                reasons.append(f"{endpoint}: {response.status_code} {response.text[:300]}")
            except (trio.TooSlowError, httpx.TimeoutException):
                reasons.append(f"{endpoint}: no answer within {self.timeout:.2g} s")
            except httpx.HTTPError as bad:
                reasons.append(f"{endpoint}: {_why(bad)}")
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as bad:
                reasons.append(f"{endpoint}: not an answer of etcd ({bad!r})")
            self._at = (self._at + 1) % len(self._endpoints)
        with contextlib.suppress(OSError, ValueError):
            _load(self._config, self._context)  # a new certificate may be there
        raise EtcdError("; ".join(reasons))

    async def _post(self, endpoint: str, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer; as the user, if there is one."""
        for again in (True, False):
            if self._config.user and not self._token:
                user = {"name": self._config.user, "password": self._config.password}
                response = await self._http.post(f"{endpoint}/v3/auth/authenticate", json=user, timeout=self.timeout)
                if response.status_code != httpx.codes.OK:
                    return response
                self._token = str(response.json()["token"])
            headers = {"Authorization": self._token} if self._token else {}
            response = await self._http.post(f"{endpoint}/v3/{path}", json=body, headers=headers, timeout=self.timeout)
            if response.status_code == httpx.codes.OK or not self._token:
                break
            self._token = ""
            if response.status_code != httpx.codes.UNAUTHORIZED or not again:
                break
        return response

    # ---- leases --------------------------------------------------------------------------------------

    async def grant(self, ttl: int) -> Lease:
        """A new lease of *ttl* seconds."""
        return await self._ask(
            "lease/grant", {"TTL": str(ttl)}, lambda answer: Lease(str(answer["ID"]), float(answer["TTL"]))
        )

    async def keep_alive(self, lease: str) -> float:
        """Renew; returns the seconds that it holds from now on, 0 if there is no such lease any more."""
        return await self._ask("lease/keepalive", {"ID": lease}, lambda answer: float(answer["result"].get("TTL", 0)))

    async def lives(self, lease: str) -> bool:
        """Whether the lease has yet to end."""
        return await self._ask("lease/timetolive", {"ID": lease}, lambda answer: float(answer.get("TTL", 0)) >= 0)

    async def revoke(self, lease: str) -> None:
        """End a lease, and with it its keys."""
        await self._ask("lease/revoke", {"ID": lease}, lambda answer: None)

    # ---- keys ----------------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        """One key, as the majority knows it."""
        return await self._ask("kv/range", {"key": _pack(key)}, _first)

    async def under(self, prefix: str, page: int = PAGE) -> list[Entry]:
        """All keys that begin with *prefix*, in order, by *page* keys a request.

        Raises EtcdError also where there are more than masters write, or one that is not text.
        """
        found: list[Entry] = []
        nbytes = 0
        start, end = prefix, _after(prefix)
        while True:
            body = {"key": _pack(start), "range_end": _pack(end), "limit": str(page)}
            some, more = await self._ask("kv/range", body, _page)
            found += some
            nbytes += sum(_ENTRY_BYTES + len(one.key) + len(one.value) for one in some)
            if nbytes > _MOST_BYTES:
                raise EtcdError(
                    f"there is too much in etcd under {prefix}; expected at most {_MOST_BYTES >> 20} MiB; got more, in "
                    f"{len(found)} keys and on; see who can write to etcd, and delete what no master wrote"
                )
            if not more or not some:
                return found
            start = found[-1].key + "\0"

    async def txn(self, compare: list[dict[str, Any]], success: list[dict[str, Any]], read: Sequence[str]) -> TxnAnswer:
        """Carry out *success* if all of *compare* holds, else read the keys *read*."""
        failure = [{"request_range": {"key": _pack(key)}} for key in read]
        return await self._ask("kv/txn", {"compare": compare, "success": success, "failure": failure}, _txn_answer)


def _why(bad: BaseException) -> str:
    """What is the matter; trio and httpx put what TLS says behind errors that say nothing."""
    behind: BaseException | None = bad
    while behind is not None:
        if isinstance(behind, ssl.SSLError):
            return str(behind)
        behind = behind.__cause__ or behind.__context__
    return str(bad) or "it breaks the connection; over https: does it want another certificate, --etcd-cert?"


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


def delete_under(prefix: str) -> dict[str, Any]:
    """A change: all keys that begin with *prefix* are removed."""
    return {"request_delete_range": {"key": _pack(prefix), "range_end": _pack(_after(prefix))}}


def _after(prefix: str) -> str:
    """The first key after all that begin with *prefix*."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _pack(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _entry(found: dict[str, Any]) -> Entry:
    raw = base64.b64decode(found["key"])
    try:
        key = raw.decode()
    except UnicodeDecodeError as bad:  # to go on reading after another one would come to no end
        raise EtcdError(
            f"a key in etcd is not text, so no master wrote it; expected UTF-8; got {raw[:200]!r}; see who can write "
            "to etcd, and delete it"
        ) from bad
    value = base64.b64decode(found.get("value", "")).decode(errors="replace")
    return Entry(key, value, int(found["create_revision"]), int(found["mod_revision"]), str(found.get("lease", "")))


def _txn_answer(answer: dict[str, Any]) -> TxnAnswer:
    succeeded = bool(answer.get("succeeded", False))
    responses = [] if succeeded else answer.get("responses", [])
    read = [_first(one["response_range"]) for one in responses]
    return TxnAnswer(succeeded, int(answer["header"]["revision"]), read)


def _page(answer: dict[str, Any]) -> tuple[list[Entry], bool]:
    return [_entry(found) for found in answer.get("kvs", [])], bool(answer.get("more", False))


def _first(answer: dict[str, Any]) -> Entry | None:
    return _entry(answer["kvs"][0]) if answer.get("kvs") else None


def _no_password() -> str:
    """For load_cert_chain: nobody is there who could type one."""
    raise ValueError("the key has a password")

"""etcd over https, with certificates of an authority of one's own, and with a user and a password."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.master.test_shared_trust import leads, masters
from wancoll.chaos import Etcd
from wancoll.errors import ConfigError
from wancoll_master.config import EtcdConfig
from wancoll_master.store.etcd import Etcd as Client
from wancoll_master.store.etcd import EtcdError, check_access, put


def files(folder: Path, ca: trustme.CA, label: str, name: str = "127.0.0.1") -> dict[str, str]:
    """Write a new certificate; its files by what EtcdConfig and Etcd call them."""
    made = ca.issue_cert(name)
    for kind, blob in (("ca", ca.cert_pem), ("cert", made.cert_chain_pems[0]), ("key", made.private_key_pem)):
        blob.write_to_path(str(folder / f"{label}.{kind}"))
    return {kind: str(folder / f"{label}.{kind}") for kind in ("ca", "cert", "key")}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Etcd, trustme.CA]]:
    """An etcd that wants certificates, and the authority."""
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd here; Debian's package is called etcd-server")
    ca = trustme.CA()
    with Etcd(**files(tmp_path_factory.mktemp("etcd"), ca, "server")) as running:
        yield running, ca


_REFUSED = r"does it want another certificate, --etcd-cert\?|alert.*certificate"  # a reset may come before the alert


# httpx leaves the body of a request that could not be sent to the garbage collector.
refused = pytest.mark.filterwarnings("ignore:Exception ignored in.*ByteStream")


async def put_and_get(config: EtcdConfig) -> str:
    async with Client(config, 5.0) as client:
        assert (await client.txn([], [put("wancoll/one", "1")], [])).succeeded
        found = await client.get("wancoll/one")
        return found.value if found is not None else ""


@refused
async def test_over_https_with_certificates(sealed: tuple[Etcd, trustme.CA], tmp_path: Path) -> None:
    etcd, ca = sealed
    mine = files(tmp_path, ca, "mine", "master-1")
    config = EtcdConfig(etcd.url, ca=mine["ca"], cert=mine["cert"], key=mine["key"])
    check_access(config)
    assert await put_and_get(config) == "1"
    with pytest.raises(EtcdError, match=_REFUSED):  # without one
        await put_and_get(EtcdConfig(etcd.url, ca=mine["ca"]))
    with pytest.raises(EtcdError, match="CERTIFICATE_VERIFY_FAILED"):  # whom it does not know
        await put_and_get(EtcdConfig(etcd.url, cert=mine["cert"], key=mine["key"]))
    theirs = files(tmp_path, trustme.CA(), "theirs", "master-1")
    with pytest.raises(EtcdError, match=_REFUSED):
        await put_and_get(EtcdConfig(etcd.url, ca=mine["ca"], cert=theirs["cert"], key=theirs["key"]))
    elsewhere = etcd.url.replace("127.0.0.1", "localhost")
    with pytest.raises(EtcdError, match=r"(?i)hostname mismatch"):
        await put_and_get(EtcdConfig(elsewhere, **mine))


@refused
async def test_a_new_certificate_is_taken_up_where_the_old_one_is_refused(
    sealed: tuple[Etcd, trustme.CA], tmp_path: Path
) -> None:
    etcd, ca = sealed
    mine, bad = files(tmp_path, ca, "mine", "master-1"), files(tmp_path, trustme.CA(), "bad", "master-1")
    shutil.copy(bad["cert"], tmp_path / "cert")
    shutil.copy(bad["key"], tmp_path / "key")
    async with Client(
        EtcdConfig(etcd.url, ca=mine["ca"], cert=str(tmp_path / "cert"), key=str(tmp_path / "key")), 5.0
    ) as client:
        with pytest.raises(EtcdError):
            await client.get("wancoll/one")
        shutil.copy(mine["cert"], tmp_path / "cert")
        shutil.copy(mine["key"], tmp_path / "key")
        with contextlib.suppress(EtcdError):
            await client.get("wancoll/one")
        await client.get("wancoll/one")


async def test_masters_share_their_trust_over_https(sealed: tuple[Etcd, trustme.CA], tmp_path: Path) -> None:
    etcd, ca = sealed
    mine = files(tmp_path, ca, "mine", "master-1")
    async with masters(etcd.url, tmp_path, **mine) as all_of_them:
        master = await all_of_them.start("a")
        await all_of_them.token()
        assert (await leads(master)).tokens


def rpc(url: str, path: str, **body: Any) -> dict[str, Any]:
    asked = urllib.request.Request(f"{url}/v3/{path}", json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(asked, timeout=5.0) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


@pytest.fixture
def guarded(etcd: Etcd) -> Iterator[str]:
    """URL of an etcd with user "wancoll", who may do all under "wancoll-" and nothing else."""
    with Etcd() as own:
        url = own.url
        for name in ("root", "wancoll"):
            rpc(url, "auth/role/add", name=name)
            rpc(url, "auth/user/add", name=name, password="sésame")
            rpc(url, "auth/user/grant", user=name, role=name)
        span = {"key": "d2FuY29sbC0=", "range_end": "d2FuY29sbC4="}  # "wancoll-" to "wancoll."
        rpc(url, "auth/role/grant", name="wancoll", perm={"permType": "READWRITE", **span})
        rpc(url, "auth/enable")
        yield url


async def test_a_user_and_a_password(guarded: str, tmp_path: Path) -> None:
    good = {"user": "wancoll", "password": "sésame"}
    async with masters(guarded, tmp_path, **good) as all_of_them:
        master = await all_of_them.start("a")
        await all_of_them.token()
        assert (await leads(master)).tokens
    access = EtcdConfig(guarded, **good)
    async with Client(access, 5.0) as client:
        await client.get("wancoll-x")
        client._token = "spoilt.1"  # etcd has forgotten it
        await client.get("wancoll-x")
        with pytest.raises(EtcdError, match="permission denied"):
            await client.get("other")
        await client.get("wancoll-x")
    async with Client(EtcdConfig(guarded, user="wancoll", password="wrong"), 5.0) as client:
        with pytest.raises(EtcdError, match="authentication failed, invalid user ID or password"):
            await client.get("wancoll-x")
    async with Client(EtcdConfig(guarded), 5.0) as client:
        with pytest.raises(EtcdError, match="user name is empty"):
            await client.get("wancoll-x")
    assert "sésame" not in repr(access)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"user": "u"},
            "--etcd-user and WANCOLL_ETCD_PASSWORD belong together; expected both or none; got no pass",
        ),
        ({"password": "p"}, "belong together; expected both or none; got no user"),
        ({"user": "u", "password": "p"}, "a password would go over the network in clear; expected https:// in --etcd"),
        ({"ca": "x"}, "certificates are of no use over http; expected https:// in --etcd; got http://10.0.0.1:2379"),
        ({"endpoints": "https://h:1", "key": "x"}, "--etcd-key needs --etcd-cert"),
        (
            {"endpoints": "https://h:1", "ca": "/none"},
            "/none: certificates for etcd cannot be used; expected PEM",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(more: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_access(EtcdConfig(**{"endpoints": "http://10.0.0.1:2379", **more}))
    assert says in str(refused.value)


def test_a_password_may_go_to_this_machine_in_clear() -> None:
    for host in ("127.0.0.1", "[::1]", "localhost"):
        check_access(EtcdConfig(f"http://{host}:2379", user="u", password="p"))
    with pytest.raises(ConfigError, match="in clear"):
        check_access(EtcdConfig("http://127.0.0.1.example:2379", user="u", password="p"))

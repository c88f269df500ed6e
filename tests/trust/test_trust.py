"""Tokens, who may come in with them, and certificates that TLS takes or refuses. Clocks are arguments."""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID

from tests.full_disk import full_disk
from wancoll.errors import ConfigError
from wancoll.limits import CLOCKS_DIFFER
from wancoll.trust.authority import Authority, Request, new_key, owner, request, times
from wancoll.trust.identity import Identity
from wancoll.trust.papers import Papers, fingerprints, identity_of, unverified, write_secret
from wancoll.trust.presented import presented
from wancoll.trust.registry import Grant, Holder, NotNow, Registry, hash_of, text
from wancoll.trust.token import parse

NOW = 1_700_000_000.0
HASH = "ab" * 32
SECRET = "s" * 43


def test_a_token_comes_back_from_its_text() -> None:
    token = parse(f" WC1{HASH}::k3v9.{SECRET}@[::1]:7400\n")
    assert (token.authority, token.id, token.secret, token.address) == (HASH, "k3v9", SECRET, "[::1]:7400")
    assert parse(str(token)) == token
    assert SECRET not in repr(token)


@pytest.mark.parametrize(
    "bad", ["", "WC2" + HASH, f"WC1{HASH}::k3v9.{SECRET}", f"WC1{HASH[1:]}::k3v9.{SECRET}@h:1", f"WC1{HASH}::k.é@h:1"]
)
def test_what_is_no_token_is_refused_without_showing_it(bad: str) -> None:
    with pytest.raises(ConfigError, match="--join: is no token; expected WC1<sha256") as refused:
        parse(bad)
    assert SECRET not in str(refused.value)


def registry(**more: object) -> Registry:
    found = Registry({}, {})
    found.add(replace(Grant(id="tok1", hashed=hash_of(SECRET), groups=("a",)), **more), NOW)  # type: ignore[arg-type]
    return found


def admit(found: Registry, name: str = "n1", key: str = "k1", *, secret: str = SECRET, now: float = NOW) -> Identity:
    return found.admit("tok1", secret, name, key, now, now + 100)


def test_a_token_gives_its_role_and_groups() -> None:
    assert admit(registry(role="observer")) == Identity("n1", "observer", ("a",), "tok1")


@pytest.mark.parametrize(
    ("more", "name", "secret", "late", "says"),
    [
        ({}, "n1", "t" * 43, 0.0, "token tok1: is not known, or its secret is wrong"),
        (
            {"expires": NOW + 60},
            "n1",
            SECRET,
            61.0,
            "has expired; expected a token that is good; got one that ended 1 s",
        ),
        ({"revoked": True}, "n1", SECRET, 0.0, "token tok1: is revoked"),
        ({"name": "n2"}, "n1", SECRET, 0.0, "is for another name; expected n2; got 'n1'; start it with --name n2"),
    ],
)
def test_a_token_is_refused(more: dict[str, object], name: str, secret: str, late: float, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        admit(registry(**more), name, secret=secret, now=NOW + late)
    assert says in str(refused.value)
    assert secret not in str(refused.value)


def test_a_token_is_good_until_it_expires() -> None:
    found = registry(expires=NOW + 60)
    assert admit(found, now=NOW + 59.9).name == "n1"


def test_a_used_up_token_takes_only_those_who_came_before() -> None:
    found = registry(uses=2)
    admit(found, "n1", "k1")
    admit(found, "n2", "k2")
    with pytest.raises(ConfigError, match="is used up; expected at most 2 daemons"):
        admit(found, "n3", "k3")
    assert "n3" not in found.holders
    assert admit(found, "n1", "k1", now=NOW + 5000).name == "n1"  # it was away


@pytest.mark.parametrize("late", [50.0, 5000.0])  # its certificate is good, and has ended
def test_a_replaced_token_takes_only_whom_it_has_given_a_name_with_the_same_key(late: float) -> None:
    found = registry(authority="a", expires=NOW + 6000)
    found.believed = ["a"]
    admit(found, "n1", "k1")
    found = found.believing(["b"])
    assert admit(found, "n1", "k1", now=NOW + late) == Identity("n1", "peer", ("a",), "tok1")
    for name, key in (("n1", "k2"), ("n2", "k1"), ("n2", "k2")):
        with pytest.raises(ConfigError, match="names no authority of this master's any more"):
            admit(found, name, key, now=NOW + 5000)
    with pytest.raises(ConfigError, match="or its secret is wrong"):
        admit(found, "n1", "k1", secret="t" * 43, now=NOW + late)
    with pytest.raises(ConfigError, match="has expired"):
        admit(found, "n1", "k1", now=NOW + 6000)
    assert not found.good(found.grants["tok1"], NOW)
    found.revoke("tok1")
    with pytest.raises(ConfigError, match="is revoked"):
        admit(found, "n1", "k1", now=NOW + late)


def test_a_key_that_comes_under_another_name_is_another_daemon() -> None:
    found = registry(uses=2)
    first = admit(found, "n1", "k1")
    admit(found, "n2", "k1")
    with pytest.raises(ConfigError, match="is used up; expected at most 2 daemons, each with one name and key"):
        admit(found, "n3", "k1")
    assert list(found.holders) == ["n1", "n2"]
    found.renew(first, "k1", NOW + 50, NOW + 150)
    for name in ("n1", "n2"):
        assert admit(found, name, "k1", now=NOW + 5000).name == name
    assert len(found.grants["tok1"].used) == 2


def test_a_use_that_is_refused_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wancoll.trust.registry.MOST_NAMES", 1)
    found = registry(uses=2)
    admit(found, "n1", "k1")
    with pytest.raises(ConfigError, match="at most 1 names"):
        admit(found, "n2", "k2")
    assert len(found.grants["tok1"].used) == 1


def test_a_key_that_an_earlier_version_counted_is_its_first_names() -> None:
    found = registry(uses=2, used=("k1", "k2"))
    admit(found, "n1", "k1")
    with pytest.raises(ConfigError, match="is used up"):
        admit(found, "n2", "k1")
    admit(found, "n2", "k2")
    assert admit(found, "n1", "k1").name == "n1"
    assert len(found.grants["tok1"].used) == 2


def second(found: Registry, key: str, now: float, **more: object) -> Identity:
    """Come as n1 with another token."""
    found.add(replace(Grant(id="tok2", hashed=hash_of("x" * 43)), **more), NOW)  # type: ignore[arg-type]
    return found.admit("tok2", "x" * 43, "n1", key, now, now + 100)


def test_a_name_is_its_first_keys_while_its_certificate_is_good() -> None:
    found = registry()
    who = admit(found)
    with pytest.raises(ConfigError, match="which is another daemon's"):
        admit(found, key="k2", now=NOW + 99)  # by the same token, which others may have
    with pytest.raises(ConfigError, match=r"another daemon's.* or wait 1 s"):
        second(found, "k2", NOW + 99)
    with pytest.raises(ConfigError, match="another daemon's"):
        found.renew(who, "k2", NOW + 99, NOW + 200)
    assert second(found, "k1", NOW + 99).token == "tok2"  # the same daemon, with another token
    assert second(found, "k2", NOW + 199).token == "tok2"
    with pytest.raises(ConfigError, match="another daemon's"):
        found.renew(who, "k1", NOW + 200, NOW + 300)  # it was connected all the time
    assert found.holders["n1"] == Holder("tok2", NOW + 299, "k2")


def test_a_name_goes_to_another_key_by_a_token_for_it_or_once_it_is_revoked() -> None:
    found = registry()
    who = admit(found)
    assert second(found, "k2", NOW + 1, name="n1").name == "n1"
    with pytest.raises(ConfigError, match="another daemon's"):
        found.renew(who, "k1", NOW + 2, NOW + 200)
    found = registry()
    admit(found)
    found.revoke("tok1")
    assert second(found, "k2", NOW + 1).name == "n1"


def test_there_is_a_bound_to_tokens_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wancoll.trust.registry.MOST_TOKENS", 2)
    monkeypatch.setattr("wancoll.trust.registry.MOST_NAMES", 2)
    found = registry(expires=NOW + 10)
    first, _ = admit(found, "n1", "k1"), admit(found, "n2", "k2", now=NOW + 5)
    with pytest.raises(NotNow, match="expected at most 2 names with certificates"):
        admit(found, "n3", "k3")
    found.renew(first, "k1", NOW + 6, NOW + 101)  # who has a name keeps it
    found.add(Grant(id="tok2", hashed="", revoked=True), NOW)
    late = Grant(id="tok3", hashed=hash_of(SECRET))
    assert found.add(late, NOW + 50) == ["tok2"]  # not tok1, which has expired: daemons that came by it may renew
    with pytest.raises(ConfigError, match="too many tokens; expected at most 2"):
        found.add(replace(late, id="tok4"), NOW + 50)
    assert found.admit("tok3", SECRET, "n3", "k3", NOW + 103, NOW + 200).name == "n3"
    assert (found.forgotten, list(found.holders)) == (["n1"], ["n2", "n3"])
    assert found.add(replace(late, id="tok4"), NOW + 106) == ["tok1"]
    for uses in (-1, 1025):
        with pytest.raises(ConfigError, match="expected 1 to 1024, or 0: any number"):
            registry().add(replace(late, uses=uses), NOW)


def test_a_token_that_was_lost_keeps_those_in_who_came_by_it_and_lets_in_nobody_new() -> None:
    found, who = Registry({}, {}), Identity("n1", "peer", ("g",), "tok1")
    found.check(who)
    assert found.adopt(who, NOW)
    assert not found.adopt(who, NOW)
    assert not found.adopt(Identity("admin", "admin"), NOW)
    assert not any(found.good(one, NOW) for one in found.grants.values())
    with pytest.raises(ConfigError, match="is not known, or its secret is wrong"):
        admit(found, "n2", "k2")
    found.renew(who, "k1", NOW, NOW + 100)
    found.add(Grant(id="tok2", hashed=hash_of(SECRET)), NOW)
    with pytest.raises(ConfigError, match="cannot give this name, which is another daemon's"):
        found.admit("tok2", SECRET, "n1", "k2", NOW + 1, NOW + 100)
    found = Registry({id: text(one) for id, one in found.grants.items()}, {})
    found.revoke("tok1")
    with pytest.raises(ConfigError, match=r"by which it came in is revoked.*start it with a new token"):
        found.check(who)


def test_a_revoked_token_takes_its_certificates_with_it() -> None:
    found = registry()
    who = admit(found)
    found.renew(who, "k1", NOW + 50, NOW + 150)
    assert found.holders["n1"].until == NOW + 150
    found.revoke("tok1")
    with pytest.raises(ConfigError, match=r"by which it came in is revoked.*start it with a new token"):
        found.renew(who, "k1", NOW + 60, NOW + 160)
    with pytest.raises(ConfigError, match="there is no such token"):
        found.revoke("nobody")


def test_what_a_registry_knows_comes_back_from_its_rows() -> None:
    found = registry(uses=3, name="n1", expires=NOW + 10)
    admit(found)
    again = Registry({k: text(v) for k, v in found.grants.items()}, {k: text(v) for k, v in found.holders.items()})
    assert (again.grants, again.holders) == (found.grants, found.holders)
    assert SECRET not in text(found.grants["tok1"])


@pytest.mark.parametrize("row", ["", "[" * 200_000, '{"id": 7}', '{"token": "t", "until": 1e999}', "\ufffd"])
def test_a_row_that_cannot_be_read_is_named(row: str) -> None:
    with pytest.raises(ConfigError, match="token t1: what was kept of it cannot be read by this version"):
        Registry({"t1": row}, {})
    with pytest.raises(ConfigError, match="name n1: what was kept of it cannot be read by this version"):
        Registry({}, {"n1": row})


def test_a_secret_goes_into_no_file_that_was_there_before(tmp_path: Path) -> None:
    secret, others = tmp_path / "key", tmp_path / "others"
    others.write_bytes(b"theirs")
    for link in (os.symlink, os.link):
        link(others, tmp_path / "key.new")
        write_secret(str(secret), b"ours")
        assert (secret.read_bytes(), others.read_bytes()) == (b"ours", b"theirs")
        assert secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [1, 100_000])
def test_of_a_full_disk_the_file_is_named(tmp_path: Path, size: int) -> None:
    """What the kernel says of a write names none, and a master that starts passes it on."""
    with full_disk(), pytest.raises(OSError, match=f"File too large: '{tmp_path}/key"):
        write_secret(str(tmp_path / "key"), bytes(size))


# ---- certificates ------------------------------------------------------------------------------------------


def test_a_file_that_is_replaced_while_it_is_read_is_of_one_time(tmp_path: Path) -> None:
    """A master makes admin.pem anew at each phase of a rotation, while commands read it."""
    ends, path, over = Ends(tmp_path, time.time()), tmp_path / "admin.pem", threading.Event()
    made = [ends.papers(name, Identity(name, "admin"), time.time(), 60.0) for name in ("a", "b")]
    texts = [Path(one.certificate).read_bytes() + Path(one.key).read_bytes() for one in made]
    both = [ends.file(f"both-{i}", one) for i, one in enumerate(texts)]

    def replace_it() -> None:
        for one in itertools.cycle(both):
            os.link(one, tmp_path / "next")
            os.replace(tmp_path / "next", path)
            if over.is_set():
                return

    os.link(both[1], path)
    with ThreadPoolExecutor(1) as other:
        done = other.submit(replace_it)
        try:
            for _ in range(500):
                Papers(ends.ca, str(path)).to_dial()
        finally:
            over.set()
        done.result()


class Ends:
    """Papers of a master and of who dials it, in a folder."""

    def __init__(self, folder: Path, now: float) -> None:
        self.folder, self.authority = folder, Authority.make(now)
        self.ca = self.file("ca.pem", self.authority.certificate)

    def file(self, name: str, data: bytes) -> str:
        write_secret(str(self.folder / name), data)
        return str(self.folder / name)

    def papers(self, label: str, who: Identity | None, now: float, lifetime: float, **more: str) -> Papers:
        key = new_key()
        wanted = Request.read(request(key))
        sign = self.authority
        pem = sign.sign(wanted, who, now, lifetime) if who else sign.sign_master(wanted, now, lifetime)
        files = {"certificate": self.file(f"{label}.pem", pem), "key": self.file(f"{label}.key", key)}
        return Papers(**{"authorities": self.ca, **files, **more})


def shake(listener: ssl.SSLContext, dialler: ssl.SSLContext) -> tuple[dict, dict]:  # type: ignore[type-arg]
    """Both ends' certificates, as the other end sees them: of the dialler, of the listener."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [dialler.wrap_bio(down, up, server_hostname="h"), listener.wrap_bio(up, down, server_side=True)]
    left = list(ends)
    for _ in range(8):
        for end in list(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not left
    ends[0].write(b"hello")
    assert ends[1].read() == b"hello"
    return ends[1].getpeercert() or {}, ends[0].getpeercert() or {}


@pytest.fixture
def now() -> float:
    return time.time()  # OpenSSL looks at the real clock


WHO = Identity("node 7/ü", "peer", ("a", "b,c"), "tok1")


def test_a_certificate_says_who_somebody_is(tmp_path: Path, now: float) -> None:
    ends = Ends(tmp_path, now)
    master, peer = ends.papers("m", None, now, 60), ends.papers("p", WHO, now, 60)
    dialler, listener = shake(master.to_listen(), peer.to_dial())
    assert identity_of(dialler) == WHO
    assert peer.is_master(listener)
    assert identity_of(listener) is None  # a master's certificate is nobody's who may ask
    assert not peer.is_master(dialler)  # a daemon cannot pose as the master
    assert os.stat(peer.key).st_mode & 0o777 == 0o600


def test_the_master_says_nothing_by_which_a_session_could_be_taken_up(tmp_path: Path, now: float) -> None:
    """Tickets come with its first bytes after the handshake: each connection proves anew who is there."""
    ends = Ends(tmp_path, now)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    dials = ends.papers("p", WHO, now, 60).to_dial().wrap_bio(down, up, server_hostname="h")
    listens = ends.papers("m", None, now, 60).to_listen().wrap_bio(up, down, server_side=True)
    for end in (dials, listens, dials, listens):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert down.pending == 0
    listens.write(b"hello")
    assert dials.read() == b"hello"
    assert dials.session is not None
    assert not dials.session.has_ticket


@pytest.mark.parametrize(
    ("at", "lifetime", "says"),
    [(-7200.0, 3600.0, "certificate has expired"), (3600.0, 3600.0, "certificate is not yet valid")],
)
def test_a_certificate_of_another_time_is_refused(
    tmp_path: Path, now: float, at: float, lifetime: float, says: str
) -> None:
    ends = Ends(tmp_path, now - 86400)
    master, peer = ends.papers("m", None, now, 60), ends.papers("p", WHO, now + at, lifetime)
    with pytest.raises(ssl.SSLCertVerificationError, match=says):
        shake(master.to_listen(), peer.to_dial())


@pytest.mark.parametrize("skew", [-600.0, 600.0])
def test_a_clock_may_be_ten_minutes_off(tmp_path: Path, now: float, skew: float) -> None:
    """Of the master that signed, against that of who looks."""
    ends = Ends(tmp_path, now + skew)
    master, peer = ends.papers("m", None, now + skew, 86400.0), ends.papers("p", WHO, now + skew, 86400.0)
    assert identity_of(shake(master.to_listen(), peer.to_dial())[0]) == WHO
    made, until = times(Path(peer.certificate).read_bytes())
    assert (made, until) == (int(now + skew), int(now + skew) + 86400)
    assert CLOCKS_DIFFER == abs(skew), "what docs/security.md says"


def test_another_authority_is_believed_by_neither_end(tmp_path: Path, now: float) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    ours, theirs = Ends(tmp_path / "1", now), Ends(tmp_path / "2", now)
    master = ours.papers("m", None, now, 60)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get local issuer|self-signed"):
        shake(master.to_listen(), theirs.papers("p", WHO, now, 60).to_dial())
    stranger = theirs.papers("q", WHO, now, 60, authorities=ours.ca)  # believes us, and shows what we have not made
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get local issuer|self-signed"):
        shake(master.to_listen(), stranger.to_dial())


def test_who_has_no_certificate_yet_may_fetch_the_authority(tmp_path: Path, now: float) -> None:
    ends = Ends(tmp_path, now)
    master = ends.papers("m", None, now, 60)
    assert shake(master.to_listen(), unverified()) == ({}, {})
    known = shake(master.to_listen(), Papers(ends.ca).to_dial())
    assert known[0] == {}
    assert Papers(ends.ca).is_master(known[1])
    assert [ends.authority.fingerprint] == fingerprints(Path(ends.ca).read_bytes())


def test_an_authority_is_what_was_kept_of_it(now: float) -> None:
    made = Authority.make(now)
    assert Authority(made.key, made.certificate).fingerprint == made.fingerprint
    with pytest.raises(ValueError, match="not that of its certificate"):
        Authority(new_key(), made.certificate)


@pytest.mark.parametrize("bad", [b"", b"nonsense", b"x" * 5000])
def test_a_bad_request_is_refused(bad: bytes) -> None:
    with pytest.raises(ConfigError, match="expected one for a P-256 key"):
        Request.read(bad)


def test_a_request_that_was_changed_is_refused() -> None:
    good = request(new_key()).splitlines()
    body = bytearray(base64.b64decode(b"".join(good[1:-1])))
    body[-1] ^= 1
    changed = b"\n".join([good[0], base64.b64encode(bytes(body)), good[-1]])
    with pytest.raises(ConfigError, match="its signature is wrong"):
        Request.read(changed)


@pytest.mark.parametrize(
    ("facts", "who"),
    [
        (("name/d", "role/peer"), Identity("d", "peer")),
        (("name/d", "role/peer", "group/a%2Fb", "token/t"), Identity("d", "peer", ("a/b",), "t")),
        (("name/d", "name/e", "role/peer"), None),
        (("name/d", "role/peer", "role/admin"), None),
        (("name/d",), None),
        (("role/peer",), None),
    ],
)
def test_a_certificate_with_two_names_or_roles_is_nobodys(facts: tuple[str, ...], who: Identity | None) -> None:
    names = [("URI", f"wancoll:{one}") for one in facts] + [("DNS", "elsewhere")]
    assert identity_of({"subjectAltName": names}) == who


def test_certificates_of_ones_own_name_a_peer() -> None:
    def names(*subject: tuple[str, str], dns: str = "") -> dict[str, object]:
        other = {"subjectAltName": (("DNS", dns),)} if dns else {}
        return {"subject": tuple((pair,) for pair in subject), **other}

    assert identity_of(names(("commonName", "c"), dns="d")) == Identity("d", "peer")
    assert identity_of(names(("commonName", "c"), ("organizationalUnitName", "admin"))) == Identity("c", "admin")
    assert identity_of(names(("organizationalUnitName", "admin"))) is None


@pytest.mark.parametrize("name", [b"\xa3\x02\x30\x00", b"\xa5\x02\x30\x00"], ids=["x400Address", "ediPartyName"])
def test_a_certificate_with_names_that_nobody_uses_cannot_be_read(name: bytes, now: float) -> None:
    """An authority of the operator's own may sign any."""
    names = b"\x82\x01d" + name
    key, when = ec.generate_private_key(ec.SECP256R1()), datetime.fromtimestamp(now, UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(when)
        .not_valid_after(when + timedelta(days=1))
        .add_extension(
            x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, bytes([0x30, len(names)]) + names), False
        )
        .sign(key, hashes.SHA256())
    )
    with pytest.raises(ValueError, match="not supported types"):
        presented(made.public_bytes(serialization.Encoding.DER))
    with pytest.raises(ValueError, match="not supported types"):
        owner(made.public_bytes(serialization.Encoding.PEM))

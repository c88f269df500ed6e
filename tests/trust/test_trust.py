"""Tokens, who may come in with them, keys and their files. Clocks are arguments."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.full_disk import full_disk
from tests.keyed import SECRET
from wancoll.errors import ConfigError
from wancoll.trust.folder import in_memory, write_secret
from wancoll.trust.identity import Identity, Role
from wancoll.trust.keys import Key, shown, verify
from wancoll.trust.registry import Grant, Holder, NotNow, Registry, hash_of
from wancoll.trust.token import parse

NOW = 1_700_000_000.0
HASH = "ab" * 32
K1, K2, K3 = (bytes([k]) * 32 for k in (1, 2, 3))


# ---- tokens ----------------------------------------------------------------------------------------------


def test_a_token_comes_back_from_its_text() -> None:
    token = parse(f" WC2{HASH}::k3v9.{SECRET}@[::1]:7400\n")
    assert (token.master, token.id, token.secret, token.address) == (bytes.fromhex(HASH), "k3v9", SECRET, "[::1]:7400")
    assert parse(str(token)) == token
    assert token.shown == f"k3v9.{SECRET}"
    assert SECRET not in repr(token)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("", "is no token; expected WC2<the"),
        ("WC2" + HASH, "is no token"),
        (f"WC2{HASH}::k3v9.{SECRET}", "is no token"),
        (f"WC2{HASH[1:]}::k3v9.{SECRET}@h:1", "is no token"),
        (f"WC2{HASH}::k.é@h:1", "is no token"),
        (f"WC1{HASH}::k3v9.{SECRET}@h:1", "is a token of an earlier version.*run the same wancoll version everywhere"),
    ],
)
def test_what_is_no_token_is_refused_without_showing_it(bad: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--join: {says}") as refused:
        parse(bad)
    assert SECRET not in str(refused.value)


# ---- who may come in -------------------------------------------------------------------------------------


def registry(**more: object) -> Registry:
    found = Registry({})
    found.add(replace(Grant(id="tok1", hashed=hash_of(SECRET), groups=("a",)), **more), NOW)  # type: ignore[arg-type]
    return found


def admit(found: Registry, name: str = "n1", key: bytes = K1, *, secret: str = SECRET, now: float = NOW) -> Identity:
    return found.admit("tok1", secret, name, key, now)


def second(found: Registry, key: bytes, **more: object) -> Identity:
    """Come as n1 with another token."""
    found.add(replace(Grant(id="tok2", hashed=hash_of("x" * 43)), **more), NOW)  # type: ignore[arg-type]
    return found.admit("tok2", "x" * 43, "n1", key, NOW)


def test_a_token_gives_its_role_and_groups_and_its_name_is_known_by_its_key_from_then_on() -> None:
    found, who = registry(role="observer"), Identity("n1", "observer", ("a",), "tok1", K1)
    assert found.known("n1", K1) is None
    assert admit(found) == who
    assert (found.known("n1", K1), found.known("n1", K2), found.known("n2", K1)) == (who, None, None)


@pytest.mark.parametrize(
    ("more", "name", "secret", "late", "says"),
    [
        ({}, "n1", "t" * 43, 0.0, "token tok1: is not known, or its secret is wrong"),
        ({"expires": NOW + 60}, "n1", SECRET, 61.0, "has expired; expected a token that is good; got one that ended 1"),
        ({"revoked": True}, "n1", SECRET, 0.0, "token tok1: is revoked"),
        ({"name": "n2"}, "n1", SECRET, 0.0, "is for another name; expected n2; got 'n1'; start it with --name n2"),
        ({"master": "cd"}, "n1", SECRET, 0.0, "names no key of this master's any more"),
        ({}, "", SECRET, 0.0, "is for somebody with a name"),
    ],
)
def test_a_token_is_refused(more: dict[str, object], name: str, secret: str, late: float, says: str) -> None:
    found = registry(**more)
    with pytest.raises(ConfigError) as refused:
        admit(found, name, secret=secret, now=NOW + late)
    assert says in str(refused.value)
    assert secret not in str(refused.value)
    assert found.holders == {}


def test_a_token_is_good_until_it_expires_and_names_a_key_that_the_master_shows() -> None:
    found = registry(expires=NOW + 60, master="cd")
    found.masters = ["ab", "cd"]
    assert admit(found, now=NOW + 59.9).name == "n1"


def test_a_used_up_token_takes_only_those_who_came_before() -> None:
    found = registry(uses=2)
    admit(found, "n1", K1)
    admit(found, "n2", K1)  # a key under another name is another daemon
    for name, key in (("n3", K3), ("n3", K1)):
        with pytest.raises(ConfigError, match="is used up; expected at most 2 daemons, each with one name and key"):
            admit(found, name, key)
    assert admit(found, "n1", K1).name == "n1"
    assert (list(found.holders), len(found.grants["tok1"].used)) == (["n2", "n1"], 2)


def test_a_name_is_its_first_keys_until_that_is_revoked_or_a_token_for_the_name_comes() -> None:
    found = registry()
    admit(found)
    with pytest.raises(ConfigError, match="which is another daemon's"):
        admit(found, key=K2)  # by the same token, which others may have
    with pytest.raises(ConfigError, match=r"which is another daemon's.*`wancoll key revoke`"):
        second(found, K2)
    with pytest.raises(ConfigError, match="which is another daemon's"):
        found.adopt(Identity("n1", "peer", (), "tok2", K2), NOW)
    assert second(found, K1).token == "tok2"  # the same daemon, with another token
    assert second(found, K2, name="n1").token == "tok2"
    assert found.holders["n1"] == Holder(K2.hex(), "tok2")
    for free in ("token", "key"):
        found = registry()
        admit(found)
        found.revoke("tok1") if free == "token" else found.revoke_key("n1")
        assert second(found, K2).token == "tok2"


def test_a_key_that_was_revoked_comes_in_by_nothing_any_more() -> None:
    found = registry()
    who = admit(found)
    found.revoke_key("n1")
    assert found.known("n1", K1) is None
    for name in ("n1", "n2"):
        with pytest.raises(ConfigError, match=f"{name}: has a key that an operator has revoked.*once of n1"):
            admit(found, name)
    for come in (found.check, lambda one: found.adopt(one, NOW)):
        with pytest.raises(ConfigError, match="has a key that an operator has revoked"):
            come(who)
    assert admit(found, "n1", K2).name == "n1"
    with pytest.raises(ConfigError, match="is no daemon that was admitted here"):
        found.revoke_key("n3")


def test_a_key_that_nobody_here_has_is_revoked_by_its_digits() -> None:
    """After a journal was lost, so that its receipt lets nobody in."""
    found = registry()
    found.revoke_key(K1.hex())
    with pytest.raises(ConfigError, match=r"has a key that an operator has revoked.*once of nobody known here"):
        found.adopt(Identity("n1", "peer", (), "tok1", K1), NOW)


def test_a_void_key_keeps_none_of_its_names() -> None:
    found = registry()
    admit(found)
    admit(found, "n2")
    found.take_changed()
    found.revoke_key("n2")
    assert found.take_changed()["name"] == {"n1": None, "n2": None}
    assert [admit(found, name, K2).name for name in ("n1", "n2")] == ["n1", "n2"]


def test_a_revoked_token_takes_those_with_it_who_came_by_it() -> None:
    found = registry()
    who = admit(found)
    found.check(who)
    found.revoke("tok1")
    with pytest.raises(ConfigError, match=r"by which it came in is revoked.*start it with a new token"):
        found.check(who)
    with pytest.raises(ConfigError, match="there is no such token"):
        found.revoke("nobody")


def test_there_is_a_bound_to_tokens_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wancoll.trust.registry.MOST_TOKENS", 2)
    monkeypatch.setattr("wancoll.trust.registry.MOST_NAMES", 2)
    found = registry(expires=NOW + 10, uses=3)
    admit(found, "n1", K1)
    admit(found, "n2", K2)
    found.known("n1", K1)  # it is here again
    with pytest.raises(ConfigError, match="expected at most 2 names"):
        found.admit("tok1", SECRET, "n3", K3, NOW, present=["n1", "n2"])
    assert admit(found, "n3", K3).name == "n3"
    assert list(found.holders) == ["n1", "n3"]
    assert found.take_changed()["name"]["n2"] is None
    found.add(Grant(id="tok2", hashed="", revoked=True), NOW)
    late = Grant(id="tok3", hashed=hash_of(SECRET))
    found.add(late, NOW + 50)
    assert list(found.grants) == ["tok1", "tok2", "tok3"], "revoked ones are kept, and take no room"
    found.add(replace(late, id="tok4"), NOW + 50)
    assert list(found.grants) == ["tok2", "tok3", "tok4"], "tok1 has ended, and those who came by it need none"
    with pytest.raises(ConfigError, match="too many tokens; expected at most 2"):
        found.add(replace(late, id="tok5"), NOW + 50)
    assert found.known("n3", K3) is not None
    found.revoke("tok1")
    with pytest.raises(ConfigError, match="by which it came in is revoked"):
        found.check(Identity("n3", "peer", (), "tok1", K3))
    for uses in (-1, 1025):
        with pytest.raises(ConfigError, match="expected 1 to 1024, or 0: any number"):
            registry().add(replace(late, uses=uses), NOW)


def test_a_token_for_a_name_takes_it_from_a_key_that_is_away_for_good() -> None:
    found = registry()
    before = admit(found)
    found.add(Grant(id="tok2", hashed=hash_of(SECRET), name="n1"), NOW)
    with pytest.raises(NotNow, match="is for a name whose daemon is here, with another key"):
        found.admit("tok2", SECRET, "n1", K2, NOW, present=["n1"])
    assert found.known("n1", K1) == before
    assert found.admit("tok2", SECRET, "n1", K2, NOW).key == K2
    with pytest.raises(ConfigError, match="has a key that an operator has revoked"):
        found.adopt(before, NOW)
    found.revoke_key("n1")
    with pytest.raises(ConfigError, match="has a key that an operator has revoked"):
        found.adopt(before, NOW)


@pytest.mark.parametrize("role", ["observer", "chaos", "admin"])
def test_commands_have_no_daemons_names(role: Role) -> None:
    found = registry(role=role)
    asks = admit(found)
    found.add(Grant(id="tok2", hashed=hash_of(SECRET)), NOW)
    assert found.admit("tok2", SECRET, "n1", K2, NOW).role == "peer"
    assert (found.known("n1", K1), found.known("n1", K3)) == (asks, None)
    found.revoke_key("n1")
    assert (found.known("n1", K1), found.known("n1", K2)) == (asks, None)


def test_a_token_that_was_lost_keeps_those_in_who_came_by_it_and_lets_in_nobody_new() -> None:
    found, who = Registry({}), Identity("n1", "peer", ("g",), "tok1", K1)
    found.adopt(who, NOW)
    assert found.known("n1", K1) == who
    assert not any(found.good(one, NOW) for one in found.grants.values())
    with pytest.raises(ConfigError, match="is not known, or its secret is wrong"):
        admit(found, "n2", K2)
    with pytest.raises(ConfigError, match="cannot give this name, which is another daemon's"):
        second(found, K2)
    found.revoke("tok1")
    with pytest.raises(ConfigError, match="by which it came in is revoked"):
        found.adopt(who, NOW)


def test_what_a_registry_knows_comes_back_from_its_rows() -> None:
    found = registry(uses=3, name="n1", expires=NOW + 10)
    admit(found)
    found.revoke_key("n1")
    admit(found, key=K2)
    rows = found.take_changed()
    again = Registry({kind: {id: row for id, row in of.items() if row is not None} for kind, of in rows.items()})
    assert (again.grants, again.holders, again.revoked) == (found.grants, found.holders, found.revoked)
    assert list(again.revoked) == [K1.hex()]
    assert SECRET not in str(rows)
    assert found.take_changed() == {}


@pytest.mark.parametrize("row", ["", "[" * 200_000, '{"id": 7}', '{"token": "t", "key": 1e999}', "\ufffd"])
@pytest.mark.parametrize("kind", ["token", "name", "key"])
def test_a_row_that_cannot_be_read_is_named(row: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind} t1: what was kept of it cannot be read by this version"):
        Registry({kind: {"t1": row}})


# ---- keys and their files --------------------------------------------------------------------------------


def test_a_key_is_made_once_and_signs(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    with pytest.raises(FileNotFoundError):
        Key.read(path)
    made = Key.read_or_make(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    again = Key.read_or_make(path)
    assert (again.public, again.pem) == (made.public, made.pem) == (made.public, Path(path).read_bytes())
    assert Key.new().public != made.public
    signature = made.sign(b"text")
    assert verify(again.public, signature, b"text")
    for public, signed, text in (
        (Key.new().public, signature, b"text"),
        (made.public, signature, b"texT"),
        (made.public, signature[:-1] + bytes([signature[-1] ^ 1]), b"text"),
        (made.public, b"", b"text"),
        (b"", signature, b"text"),
        (b"\xff" * 32, signature, b"text"),
    ):
        assert not verify(public, signed, text)


def test_a_certificate_shows_its_key_and_no_other_kind_does() -> None:
    key = Key.new()
    pem = key.certificate()
    assert len(pem) < 1024
    assert shown(x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)) == key.public
    other = ec.generate_private_key(ec.SECP256R1())
    made = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(x509.Name([])).serial_number(1)
    found = x509.load_pem_x509_certificate(pem)
    made = made.not_valid_before(found.not_valid_before_utc).not_valid_after(found.not_valid_after_utc)
    theirs = made.public_key(other.public_key()).sign(key._private, None).public_bytes(serialization.Encoding.DER)
    for bad in (theirs, b"", b"nonsense", theirs[:-1]):
        assert shown(bad) == b""


@pytest.mark.parametrize("bad", [b"", b"nonsense", b"x" * 5000, b"P-256", b"password"])
def test_a_file_that_holds_no_key_is_named(tmp_path: Path, bad: bytes) -> None:
    private = ec.generate_private_key(ec.SECP256R1()) if bad == b"P-256" else Key.new()._private
    locks = serialization.BestAvailableEncryption(b"x") if bad == b"password" else serialization.NoEncryption()
    if bad in (b"P-256", b"password"):
        bad = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locks)
    (tmp_path / "key").write_bytes(bad)
    (tmp_path / "key").chmod(0o600)
    for read in (Key.read, Key.read_or_make):
        with pytest.raises(ConfigError, match=f"{tmp_path}/key: cannot be used as key; expected an Ed25519 key in PEM"):
            read(str(tmp_path / "key"))
    assert (tmp_path / "key").read_bytes() == bad


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_is_not_used(tmp_path: Path, mode: int) -> None:
    Key.read_or_make(str(tmp_path / "key"))
    (tmp_path / "key").chmod(mode)
    with pytest.raises(ConfigError, match=r"is a key that others may read or replace.*chmod 600; else delete it"):
        Key.read(str(tmp_path / "key"))


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


def test_what_is_in_memory_is_on_no_disk() -> None:
    with in_memory(b"secret") as path:
        assert Path(path).read_bytes() == b"secret"
        assert os.readlink(path).startswith("/memfd:")

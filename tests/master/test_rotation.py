"""A new authority takes the old one's place: the phases by themselves, and a real gate whose clock is an argument.

With processes, and while operations run: tests/faults/test_rotation.py.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import trio

from tests.master.test_gate import hello, secure
from wancoll.cli.asking import Asking
from wancoll.cli.changing import ca
from wancoll.cli.changing import token as token_command
from wancoll.cli.looking import status
from wancoll.errors import ConfigError
from wancoll.limits import CLOCKS_DIFFER, PROTOCOL_VERSION
from wancoll.net.enroll import Wallet, WrongMaster
from wancoll.net.hot import Hot
from wancoll.net.tls import Tls
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.trust.authority import Authority, Request, issuer_of, new_key, owner, request
from wancoll.trust.identity import Identity, Role
from wancoll.trust.papers import Papers, fingerprints, write_secret
from wancoll.trust.token import Token, parse
from wancoll.wire import messages as m
from wancoll_master.core.rotation import Rotation
from wancoll_master.gate import Gate
from wancoll_master.store.authorities import as_text, from_text
from wancoll_master.store.journal import Journal

NOW = 1_700_000_000.0
DAY = 86400.0
ADMIN = Identity("admin", "admin")


# ---- the phases --------------------------------------------------------------------------------------


def test_the_phases_follow_each_other_by_time_alone() -> None:
    steady = Rotation(("a",))
    assert (steady.signs, steady.believed, steady.due(1e12)) == ("a", ("a",), False)
    first = steady.begin("b", NOW, 100.0, NOW)
    assert (first.phase, first.signs, first.newest, first.believed) == ("spreading", "a", "b", ("a", "b"))
    assert (first.since, first.until) == (NOW, NOW + 100)
    assert not first.due(NOW + 99.9)
    assert first.due(NOW + 100)
    second = first.next(NOW + 130, NOW)  # late, so it lasts from then on
    assert (second.phase, second.signs, second.newest, second.believed) == ("retiring", "b", "b", ("b", "a"))
    assert (second.since, second.until) == (NOW + 130, NOW + 230)
    assert not second.due(NOW + 229.9)
    assert second.next(NOW + 230, NOW) == Rotation(("b",))


def test_a_phase_waits_for_the_last_certificate_of_before() -> None:
    first = Rotation(("a",)).begin("b", NOW, 100.0, NOW + 5000)
    assert first.until == NOW + 5000
    assert first.next(NOW + 5000, NOW + 9000).until == NOW + 9000


def test_there_is_one_rotation_at_a_time() -> None:
    first = Rotation(("a",)).begin("b", NOW, 100.0, NOW)
    for one in (first, first.next(NOW + 100, NOW)):
        with pytest.raises(ConfigError, match=rf"under way already; .*got {one.phase} for 100 s more; `wancoll"):
            one.begin("c", one.since, 100.0, NOW)
    for phase, authorities in (("steady", ("a", "b")), ("spreading", ("a",)), ("retiring", ())):
        with pytest.raises(ValueError, match=r"authorities, . expected while"):
            Rotation(authorities, phase)  # type: ignore[arg-type]


def test_a_phase_that_ended_while_no_master_led_goes_on_for_a_while() -> None:
    first = Rotation(("a",)).begin("b", NOW, DAY, NOW)
    assert first.taken_up(NOW + 5) == first
    assert first.taken_up(NOW + 3 * DAY).until == NOW + 3 * DAY + 60
    assert replace(first, period=8.0).taken_up(NOW + 3 * DAY).until == NOW + 3 * DAY + 2
    assert Rotation(("a",)).taken_up(NOW).until == 0.0


@pytest.mark.parametrize("skew", [-CLOCKS_DIFFER, 0.0, CLOCKS_DIFFER])
def test_two_masters_whose_clocks_differ_make_no_phase_shorter_than_a_certificates_life(skew: float) -> None:
    """One begins a phase and the other ends it; nobody has a certificate then that was signed before it."""
    lifetime = DAY
    state, true = Rotation(("a",)).begin("b", NOW, lifetime + CLOCKS_DIFFER, NOW), NOW
    for signs in ("a", "b"):
        began = true
        assert state.signs == signs
        while not state.due(true + skew):  # the other master's clock
            true += 1.0
        assert true - began >= lifetime
        assert true - began <= lifetime + 2 * CLOCKS_DIFFER
        state = state.next(true + skew, NOW)
        skew = 0.0 if state.phase == "retiring" else skew
        state = replace(state, since=true, until=true + state.period) if state.phase == "retiring" else state
    assert state == Rotation(("b",))


# ---- the gate ----------------------------------------------------------------------------------------


class Office:
    """A gate whose clock is ours, its folder, and who comes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.key = folder / "state", [NOW], new_key()
        self.journal = Journal(str(folder / "journal"))
        self.events: list[tuple[str, str]] = []
        self.gate = self.start()

    def start(self, **more: float) -> Gate:
        found = Gate(str(self.folder), self.journal, clock=lambda: self.clock[0], **more)
        found.address = "h:1"
        return found

    def again(self) -> None:
        """As after kill -9: only what was kept is left."""
        self.gate = self.start()

    def ask(self, message: m.AboutTrust, who: Identity | None = ADMIN) -> Any:
        """Of one whose certificate was signed by who signs now, unless it says otherwise."""
        if who is not None and not who.authority:
            who = self.gate.renewed(who)
        try:
            return self.gate.answer(message, who)
        finally:
            self.settle()

    def phase(self) -> tuple[str, list[str], list[str]]:
        """As the admin is told, as daemons are, and as the folder has it."""
        told = self.ask(m.AskRotation(PROTOCOL_VERSION))
        assert isinstance(told, m.RotationIs)
        believed = self.gate.authorities
        assert believed is not None
        return (
            told.phase,
            fingerprints(believed.certificates),
            fingerprints((self.folder / "authority.pem").read_bytes()),
        )

    def rotate(self, seconds: float = 0.0, *, now: bool = False) -> m.RotationIs:
        told = self.ask(m.Rotate(PROTOCOL_VERSION, seconds, now))
        assert isinstance(told, m.RotationIs)
        return told

    def token(self) -> Token:
        made = self.ask(m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 0.0))
        assert isinstance(made, m.Tokens)
        return parse(made.made)

    def come(self, token: Token, name: str = "d") -> m.Enrolled:
        asked = m.Enroll(PROTOCOL_VERSION, token.id, token.secret, name, request(self.key))
        found = self.ask(asked, None)
        assert isinstance(found, m.Enrolled)
        return found

    def pass_time(self, seconds: float) -> bool:
        self.clock[0] += seconds
        return self.advance()

    def advance(self) -> bool:
        try:
            return self.gate.advance()
        finally:
            self.settle()

    def settle(self) -> None:
        if (done := self.gate.settle()) is not None:
            self.events.append(done)

    def shown_to(self, folder: Path, believes: str) -> str:
        """Whose certificate the master shows to one that believes only this one; else why it refuses it."""
        kept, _ = from_text((self.folder / "authority.key").read_bytes())
        [mine] = [one.certificate for one in kept.authorities if one.fingerprint == believes]
        write_secret(str(folder / "one.pem"), mine)
        papers, up, down = Papers(str(folder / "one.pem")), ssl.MemoryBIO(), ssl.MemoryBIO()
        dials = papers.to_dial().wrap_bio(down, up, server_hostname=papers.asks_for("h"))
        listens = self.gate.context().wrap_bio(up, down, server_side=True)
        for end in (dials, listens, dials, listens):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as bad:
                return str(bad)
        der = dials.getpeercert(binary_form=True)
        assert der is not None
        of = issuer_of(ssl.DER_cert_to_PEM_cert(der).encode(), b"".join(one.certificate for one in kept.authorities))
        assert of is not None
        return kept.authorities[of].fingerprint


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


async def test_a_rotation_from_its_begin_to_its_end(office: Office) -> None:
    before = office.token()
    (a,) = office.phase()[1]
    assert (office.phase()[0], before.authority) == ("steady", a)
    told = office.rotate()
    assert (told.phase, told.until) == ("spreading", NOW + DAY + 600)
    b = told.authorities[1].sha256
    assert [(one.sha256, one.signs) for one in told.authorities] == [(a, True), (b, False)]
    assert told.authorities[0].ends - told.authorities[0].made == pytest.approx(3650 * DAY)
    assert office.phase() == ("spreading", [a, b], [a, b])
    between = office.token()
    assert between.authority == b
    for token in (before, between):  # the old one signs; who comes learns of both
        found = office.come(token)
        assert (issuer_of(found.certificate, found.authorities), fingerprints(found.authorities)) == (0, [a, b])
    assert not office.pass_time(DAY + 599)
    assert office.pass_time(1)
    assert office.phase() == ("retiring", [b, a], [b, a])
    found = office.come(before)
    assert (issuer_of(found.certificate, found.authorities), fingerprints(found.authorities)) == (0, [b, a])
    assert not office.pass_time(DAY + 599)
    listed = office.ask(m.ListTokens(PROTOCOL_VERSION))
    assert isinstance(listed, m.Tokens)
    assert [one.replaced for one in listed.tokens] == [False, False]
    assert office.pass_time(1)
    assert office.phase() == ("steady", [b], [b])
    assert sorted(os.listdir(office.folder)) == ["admin.pem", "authority.key", "authority.pem", "master.pem"]
    assert len(from_text((office.folder / "authority.key").read_bytes())[0].authorities) == 1  # its key is gone, too
    refused = office.come(before, "newcomer").refused
    assert "names no authority of this master's any more; expected a token that is good; got one of an aut" in refused
    assert "`wancoll token create` makes a new one" in refused
    assert not office.come(between).refused
    listed = office.ask(m.ListTokens(PROTOCOL_VERSION))
    assert isinstance(listed, m.Tokens)
    assert {one.id: one.replaced for one in listed.tokens} == {before.id: True, between.id: False}
    assert not office.pass_time(1000 * DAY)
    assert office.events == [
        ("authority", f"an operator rotates it: {b[:12]}... is made known to all"),
        ("authority", f"{b[:12]}... signs from now on; what the old one has signed is believed still"),
        ("authority", f"the rotation is over: {b[:12]}... alone is believed"),
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_a_master_that_leads_late_in_a_phase_leaves_daemons_time_to_come_back(tmp_path: Path, shared: bool) -> None:
    late = Rotation((Authority.make(NOW),)).begin(Authority.make(NOW), NOW, DAY, NOW)
    clock = [NOW + 2 * DAY]
    if shared:
        found = Gate(str(tmp_path), None, shared=late, clock=lambda: clock[0])
        found.lead(SimpleNamespace(rotation=late, trust=lambda kind: {}))  # type: ignore[arg-type]
    else:
        write_secret(str(tmp_path / "authority.key"), as_text(late).encode())
        found = Gate(str(tmp_path), Journal(""), clock=lambda: clock[0])
    assert not found.due
    clock[0] += 60
    assert found.due


async def test_who_was_away_when_its_certificate_ended_comes_back_by_a_token_that_was_replaced(office: Office) -> None:
    """With its key and its name; not where all began anew at once."""
    token = office.token()
    first, key = office.come(token), office.key
    office.rotate()
    assert office.pass_time(DAY + 600)
    assert office.pass_time(DAY + 600)
    (b,) = office.phase()[1]
    office.again()
    found = office.come(token)
    assert (fingerprints(found.authorities), issuer_of(found.certificate, found.authorities)) == ([b], 0)
    assert owner(found.certificate) == owner(first.certificate) == Identity("d", "peer", (), token.id)
    office.key = new_key()
    for name in ("d", "e"):
        assert "names no authority of this master's any more" in office.come(token, name).refused
    office.key = key
    office.rotate(now=True)
    assert "is not known, or its secret is wrong" in office.come(token).refused


async def test_who_came_by_a_token_that_was_replaced_renews_all_the_same(office: Office) -> None:
    token = office.token()
    assert not office.come(token).refused
    office.rotate()
    who = Identity("d", "peer", (), token.id)
    for expected in (("retiring", False), ("steady", False)):
        office.pass_time(DAY + 600)
        renewed = office.ask(m.Renew(request(office.key)), who)
        who = office.gate.renewed(who)
        assert isinstance(renewed, m.Enrolled)
        assert (office.phase()[0], bool(renewed.refused)) == expected
        assert issuer_of(renewed.certificate, renewed.authorities) == 0
    office.gate.check(who)


async def test_the_old_one_is_believed_until_the_last_certificate_that_it_signed_ends(office: Office) -> None:
    """Also where the master gave them a longer life than a phase has."""
    token = office.token()
    office.rotate()
    office.gate = office.start(lifetime=5 * DAY)
    assert not office.come(token).refused
    for later, expected in ((DAY + 600, ("retiring", NOW + 5 * DAY)), (4 * DAY - 601, None), (1, ("", 0.0))):
        assert office.pass_time(later) == (expected is not None)
        assert expected is None or office.gate.rotating == expected


async def test_a_certificate_of_the_old_one_is_renewed_at_once_when_the_new_one_signs(office: Office) -> None:
    token = office.token()
    office.rotate()
    office.clock[0] += DAY + 599
    office.come(token)
    who, ask = Identity("d", "peer", (), token.id), m.Renew(request(office.key))
    too_often = office.ask(ask, who)
    assert isinstance(too_often, m.Enrolled)
    assert "too often" in too_often.refused
    assert office.pass_time(1)
    renewed = office.ask(ask, who)
    assert isinstance(renewed, m.Enrolled)
    assert not renewed.refused
    again = office.ask(ask, who)
    assert isinstance(again, m.Enrolled)
    assert "too often" in again.refused


@pytest.mark.parametrize("crash", ["before", "between", "after"])
async def test_a_master_that_is_killed_at_a_change_of_phase_is_in_the_former_or_in_the_next_one(
    office: Office, crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of a file may be the last thing that it did."""
    token = office.token()
    (a,) = office.phase()[1]
    done: list[str] = []

    def write(path: str, data: bytes) -> None:
        if crash == "before" or (crash == "between" and done):
            raise KeyboardInterrupt
        done.append(path)
        write_secret(path, data)
        if crash == "after" and path.endswith("authority.key"):
            raise KeyboardInterrupt

    def killed(what: Any) -> None:
        done.clear()
        with monkeypatch.context() as patch:
            patch.setattr("wancoll_master.gate.write_secret", write)
            with pytest.raises(KeyboardInterrupt):
                what()
        office.again()

    killed(office.rotate)
    assert office.phase()[0] == ("spreading" if crash == "after" else "steady")
    if crash != "after":
        office.rotate()
    _, believed, kept = office.phase()
    assert (believed, believed[0], len(believed)) == (kept, a, 2)
    b = believed[1]
    for phase, after in (("retiring", [b, a]), ("steady", [b])):
        office.clock[0] += DAY + 600
        killed(office.advance)
        if crash != "after":
            assert office.phase()[1] != after
            assert not office.advance()  # it waits for those who come back first
            assert office.pass_time(60)
        assert office.phase() == (phase, after, after)
        assert not office.come(office.token()).refused
        if phase == "retiring":
            assert not office.come(token).refused
    assert "any more" in office.come(token).refused


async def test_a_phase_that_cannot_be_written_is_not_begun(office: Office) -> None:
    office.rotate()
    before, away = office.phase(), office.folder.with_name("away")
    office.folder.rename(away)
    with structlog.testing.capture_logs() as lines:
        assert not office.pass_time(DAY + 600)
    assert [line["event"] for line in lines] == ["the rotation of the authority cannot go on; it is tried again"]
    away.rename(office.folder)
    assert office.phase()[:2] == before[:2]
    assert not office.pass_time(29)
    assert office.pass_time(1)
    assert office.phase()[0] == "retiring"


@pytest.mark.parametrize("missing", ["authority.pem", "authority.key"])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_rotation_of_which_one_file_cannot_be_written_has_not_happened(
    office: Office, missing: str, at_once: bool
) -> None:
    token, before = office.token(), office.phase()
    in_the_way = office.folder / f"{missing}.new"
    in_the_way.mkdir()
    assert "cannot be written" in office.rotate(now=at_once).refused
    in_the_way.rmdir()
    assert office.phase() == before
    assert fingerprints((office.folder / "authority.pem").read_bytes()) == before[1]
    office.again()
    assert office.phase() == before
    assert not office.come(token).refused


async def test_the_master_shows_the_certificate_of_whom_the_other_end_believes(office: Office, tmp_path: Path) -> None:
    office.clock[0] = time.time()  # as ssl's
    (a,) = office.phase()[1]
    b = office.rotate().authorities[1].sha256
    for phase in ("spreading", "retiring"):
        assert office.phase()[0] == phase
        assert [office.shown_to(tmp_path, one) for one in (a, b)] == [a, b]
        office.clock[0] += {"spreading": 3, "retiring": 9}[phase] * DAY
        assert office.advance()
        office.clock[0] = time.time()
        office.gate.reload()  # made as of now
    assert office.phase()[0] == "steady"
    assert office.shown_to(tmp_path, b) == b


async def test_who_may_not_rotate_is_refused_and_so_is_what_is_too_short(office: Office) -> None:
    told = office.ask(m.Rotate(PROTOCOL_VERSION, 0.0, True), Identity("x", "admin", ("g",)))
    assert isinstance(told, m.RotationIs)
    assert "may not look after tokens; expected an admin of all groups" in told.refused
    told = office.rotate(3600.0)
    assert "--phase: a phase cannot be so long; expected 86400 s, the lifetime of certificates, to" in told.refused
    assert "got 3600 s" in told.refused
    assert office.phase()[0] == "steady"
    office.rotate(DAY)
    assert "a rotation is under way already; expected one that ended; got spreading for 86400 s more" in (
        office.rotate().refused
    )


async def test_at_once_all_begins_anew(office: Office) -> None:
    token, names = office.token(), office.journal.trust
    office.come(token)
    (a,) = office.phase()[1]
    office.rotate()
    told = office.rotate(now=True)  # also in the middle of another one
    assert (told.phase, len(told.authorities)) == ("steady", 1)
    c = told.authorities[0].sha256
    new = parse(told.made)
    assert (new.authority, office.phase()) == (c, ("steady", [c], [c]))
    assert c != a
    for role, question in (("peer", m.Renew(request(office.key))), ("admin", m.ListTokens(PROTOCOL_VERSION))):
        refused = office.ask(question, Identity("d", role, (), "", a))  # type: ignore[arg-type]
        assert f"a certificate of an authority that was replaced; expected one that this master believes: {c}; got" in (
            refused.refused
        )
    assert "is not known, or its secret is wrong" in office.come(token).refused
    assert not office.come(new).refused
    assert (list(names("token")), list(names("name")), list(names("authority"))) == ([new.id], ["d"], [c])
    office.again()
    assert office.phase()[1] == [c]
    assert not office.come(new, "d").refused


async def test_who_was_verified_a_moment_before_all_began_anew_has_shown_nothing(
    office: Office, tmp_path: Path
) -> None:
    """He has made himself a certificate that names no token."""
    office.clock[0] = time.time()  # as ssl's
    office.again()
    papers = papers_by(from_text((office.folder / "authority.key").read_bytes())[0].signs, tmp_path, "peer")
    listens, up, down = Tls(office.gate.context(), listens=True), ssl.MemoryBIO(), ssl.MemoryBIO()
    dials = papers.to_dial().wrap_bio(down, up, server_hostname=papers.asks_for("h"))
    while not listens.done:
        with suppress(ssl.SSLWantReadError):
            dials.do_handshake()
        listens.shake(up.read())
        down.write(listens.outgoing())
    who = office.gate.identity(listens)
    assert who is not None
    assert (who.name, who.token, [who.authority]) == ("evil", "", office.phase()[1])
    office.gate.check(who)
    office.rotate(now=True)
    for one in (who, office.gate.identity(listens)):
        assert one is not None
        assert one.authority not in office.phase()[1]
        with pytest.raises(ConfigError, match=r"authority that was replaced.*start it with a new token"):
            office.gate.check(one)


async def test_what_is_kept_comes_back_and_nonsense_is_refused(office: Office) -> None:
    office.rotate()
    rotation, id = from_text((office.folder / "authority.key").read_bytes())
    assert id == ""
    assert (office.folder / "authority.key").stat().st_mode & 0o777 == 0o600
    again, id = from_text(as_text(rotation, "x"))
    assert (again.phase, again.until, id) == ("spreading", NOW + DAY + 600, "x")
    assert [one.fingerprint for one in again.authorities] == [one.fingerprint for one in rotation.authorities]
    for bad in ("", "{}", '{"authorities": []}', as_text(rotation).replace("spreading", "steady"), "[" * 100_000):
        with pytest.raises((ValueError, RecursionError)):
            from_text(bad)
        (office.folder / "authority.key").write_text(bad)
        with pytest.raises(ConfigError, match=r"the authority cannot be used.*choose another folder with --state"):
            office.again()


# ---- over TLS ----------------------------------------------------------------------------------------


def papers_by(stolen: Authority, folder: Path, role: Role) -> Papers:
    """Made by a thief of its key: they name no token."""
    key = new_key()
    pem = stolen.sign(Request.read(request(key)), Identity("evil", role), time.time(), DAY)
    write_secret(str(folder / "evil.pem"), pem + key)
    write_secret(str(folder / "believed.pem"), stolen.certificate)
    return Papers(str(folder / "believed.pem"), str(folder / "evil.pem"))


@pytest.mark.parametrize("role", ["peer", "admin"])
async def test_at_once_all_who_are_connected_are_sent_away_the_thief_too(tmp_path: Path, role: Role) -> None:
    """Also who has said nothing so far."""
    async with secure(tmp_path) as master:
        stolen = from_text((tmp_path / "state" / "authority.key").read_bytes())[0].signs
        evil, honest = papers_by(stolen, tmp_path, role), (await master.join("d")).papers
        async with master.dial(evil) as one, master.dial(evil) as other, master.dial(honest) as daemon:
            await one.say(hello("evil"))
            await daemon.say(hello("d"))
            for peer in (one, daemon):
                assert isinstance(await peer.hear(), m.Welcome)
            told = await master.ask(m.Rotate(PROTOCOL_VERSION, 0.0, True), master.papers)
            (new,) = [one.sha256 for one in told.authorities]
            assert new == parse(told.made).authority
            for peer in (one, other, daemon):
                said = await peer.expect(m.Bye)
                assert said.final
                assert "has a certificate of an authority that was replaced; expected one that this" in said.reason
                assert "start it with a new token: --join" in said.reason
        assert [one.id for one in (await master.admin(m.ListTokens(PROTOCOL_VERSION))).tokens] == [parse(told.made).id]
        status = await master.ask(m.StatusRequest(PROTOCOL_VERSION), master.papers)
        begun = f"an operator has replaced it at once by {new[:12]}...: all daemons are sent away, "
        assert [(one.kind, one.text) for one in status.events[-3:]] == [
            ("authority", begun + "no token of before is good"),
            ("evicted", "daemon evil was sent away: it has a certificate of an authority that was replaced"),
            ("evicted", "daemon d was sent away: it has a certificate of an authority that was replaced"),
        ]


async def test_tokens_and_certificates_through_a_rotation(tmp_path: Path) -> None:
    """Old and new tokens join in each phase; afterwards the old one, and certificates, are refused with what to do."""
    keys = tmp_path / "state" / "authority.key"
    tokens: list[Token] = []
    wallets: list[Wallet] = []
    for phase in ("spreading", "retiring", "steady"):
        async with secure(tmp_path) as master:
            if phase == "spreading":
                assert master.token is not None
                told = await master.ask(m.Rotate(PROTOCOL_VERSION, 0.0, False), master.papers)
                assert isinstance(told, m.RotationIs)
                tokens += [master.token, await master.make(seconds=600.0)]
                assert [one.authority for one in tokens] == [one.sha256 for one in told.authorities]
            assert from_text(keys.read_bytes())[0].phase == phase
            master.token = tokens[0]
            for wallet in wallets:  # who came before is let in, though its token may be worthless by now
                if phase == "steady" and wallet.name.startswith("spreading"):  # nobody has renewed it
                    with pytest.raises(
                        ConnectionError, match="the certificate shown is of another authority: join wit"
                    ):
                        await master.ask(hello(wallet.name), wallet.papers)
                    again = partial(wallet.enroll, master.address, wallet.name, 20.0)
                    await trio.to_thread.run_sync(again)  # it was told of the new one, and has its key
                    assert isinstance(await master.ask(hello(wallet.name), wallet.papers), m.Welcome)
                else:
                    assert wallet.good(wallet.name, time.time())
                    assert isinstance(await master.ask(hello(wallet.name), wallet.papers), m.Welcome)
                    assert wallet.believe((tmp_path / "state" / "authority.pem").read_bytes())  # as it is told then
                    assert (wallet.renew_at() == 0.0) == wallet.name.startswith("spreading")
            for i, token in enumerate(tokens):
                name = f"{phase}-{i}"
                if (phase, i) == ("steady", 0):
                    with pytest.raises(
                        WrongMaster, match=r"expected .* if the master's authority was replaced \(`wancoll"
                    ):
                        await master.join(name, token)
                    continue
                wallets.append(await master.join(name, token))
                assert wallets[-1].good(name, time.time())
                assert wallets[-1].renew_at() > time.time()
                assert not (Path(wallets[-1].folder) / "named.pem").exists()
                assert isinstance(await master.ask(hello(name), wallets[-1].papers), m.Welcome)
        rotation, _ = from_text(keys.read_bytes())
        if phase != "steady":
            keys.write_text(as_text(rotation.next(time.time(), 0.0)))


async def test_the_command_shows_and_begins_it_and_does_nothing_at_once_without_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with secure(tmp_path) as master:
        assert master.token is not None
        with_it: dict[str, Any] = {
            "master": master.address,
            "asking": Asking(state=str(tmp_path / "state"), timeout=30),
        }

        async def said(command: Any, **options: Any) -> list[str]:
            capsys.readouterr()
            assert await trio.to_thread.run_sync(partial(command, **options, **with_it)) == 0
            lines = capsys.readouterr().out.splitlines()
            return [line for line in lines if not re.match(r"\d{4}-", line)]  # without the master's log

        a = master.token.authority
        first, head, one = await said(ca.show)
        assert first == "steady: one authority is believed, and signs"
        assert (head.split(), one.split()[0], one.split()[-1]) == (["SHA256", "MADE", "ENDS", "SIGNS"], a, "yes")
        for options, words in (
            (
                {"now": True},
                "is not done without --yes; expected --now --yes; got --now alone; with it all daemons are se",
            ),
            ({"now": True}, f"The master at {master.address} has 0 daemons and 0 groups with 0 members now. Without"),
            ({"yes": True}, "--yes: says nothing here"),
            ({"now": True, "yes": True, "phase": 9.0}, "--now and --phase: exclude each other"),
            ({"phase": 9.0}, "a phase cannot be so long; expected 86400 s, the lifetime of certificates"),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)):
                await said(ca.rotate, **options)
        assert (await said(ca.show))[1:] == [head, one]
        first, _, *both = await said(ca.rotate)
        assert re.fullmatch(
            r"spreading, until \S+Z or soon after: a new authority is believed beside the old .*", first
        )
        assert [(line.split()[0] == a, line.split()[-1]) for line in both] == [(True, "yes"), (False, "no")]
        assert await said(ca.show) == [first, _, *both]
        ask = partial(status.find, [master.address], with_it["asking"])
        found, _roles = await trio.to_thread.run_sync(ask)
        assert (found.rotation, found.rotation_until > time.time()) == ("spreading", True)
        first, _, only, line = await said(ca.rotate, now=True, yes=True)
        assert line.startswith(f"wancoll peer --join WC1{only.split()[0]}::")
        assert only.split()[0] not in {one.split()[0] for one in both}
        found, _roles = await trio.to_thread.run_sync(ask)
        assert (found.rotation, found.rotation_until) == ("", 0.0)
        [head, listed] = await said(token_command.show)
        assert head.split() == ["ID", "ROLE", "NAME", "GROUPS", "USES", "EXPIRES"]
        id, *known, until = listed.split()
        assert (id, known) == (parse(line.split()[-1]).id, ["peer", "any", "all", "unlimited"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", until)
        made = await master.make(uses=3, name="n", groups=["g", "h"])
        assert [made.id, "peer", "n", "g,h", "0/3"] in [row.split()[:5] for row in await said(token_command.show)]


async def test_a_daemon_that_does_not_know_the_masters_authority_any_more_uses_its_token(tmp_path: Path) -> None:
    """Though its certificate seems good to it."""
    async with secure(tmp_path) as master:
        wallet, other = await master.join("d"), Authority.make(time.time())
        assert wallet.token is not None
        who = Identity("d", "peer", (), wallet.token.id)
        pem = other.sign(Request.read(wallet.request()), who, time.time(), 3600.0)
        wallet.keep(pem, other.certificate)
        assert wallet.good("d", time.time())
        with socket.create_server(("127.0.0.1", 0)) as lanes:
            connected, lost = trio.Event(), list[str]()
            no = lambda *_: None  # noqa: E731
            control = Control(
                PeerConfig(master=master.address), "d", 1, [], lanes, Hot(), no, connected.set,
                lambda reason, live: lost.append(reason), no, m.Heartbeat, wallet,
            )  # fmt: skip
            async with trio.open_nursery() as nursery:
                nursery.start_soon(control.run)
                await connected.wait()
                nursery.cancel_scope.cancel()
        assert len(lost) == 1
        assert "its certificate is of another authority than that of the token" in lost[0]
        assert (
            issuer_of(*((Path(wallet.folder) / name).read_bytes() for name in ("certificate.pem", "authority.pem")))
            == 0
        )

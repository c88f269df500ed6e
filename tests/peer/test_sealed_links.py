"""Lanes over TLS: who gets in, who does not, and what each end is told."""

from __future__ import annotations

import shutil
import socket
import struct
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.peer.test_hub import LANES, ends_of
from tests.peer.test_member import KEY
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.native.seal import Seals
from wancoll.net.dial import DialFailed, read_frame
from wancoll.peer.core import links as core
from wancoll.peer.links import connections
from wancoll.peer.links.connections import Connection, Connector
from wancoll.peer.links.lanes import greet
from wancoll.peer.links.probes import probe
from wancoll.trust.authority import Authority, Request, new_key, request, times
from wancoll.trust.identity import Identity, Role
from wancoll.trust.papers import Papers
from wancoll.wire import messages as m
from wancoll.wire.framing import encode


class Office:
    """An authority, and who has papers of it."""

    def __init__(self, folder: Path, name: str = "office") -> None:
        self.authority = Authority.make(time.time())
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "ca.pem").write_bytes(self.authority.certificate)

    def papers(
        self, name: str, role: Role = "peer", at: float = 0.0, lifetime: float = 3600.0, groups: tuple[str, ...] = ()
    ) -> Papers:
        """For *name*; *at*: seconds from now, when they are made."""
        key = new_key()
        owner = Identity(name, role, groups)
        made = self.authority.sign(Request.read(request(key)), owner, time.time() + at, lifetime)
        (self.folder / f"{name}.pem").write_bytes(made)
        (self.folder / f"{name}.key").write_bytes(key)
        return Papers(*(str(self.folder / file) for file in ("ca.pem", f"{name}.pem", f"{name}.key")))


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


async def test_notes_pass_over_a_sealed_link_and_it_is_made_anew(office: Office) -> None:
    async with ends_of(office.papers("d1"), office.papers("d2")) as (a, b):
        for _ in range(2):
            for end in (a, b):
                await end.hears(core.LinksUp)
            for i in range(300):  # more than one record holds
                a.hub.send_note(a.owner, 2, b"%d" % i)
                if i % 50 == 49:
                    for j in range(i - 49, i + 1):
                        assert await b.hears(core.Noted) == core.Noted(b.owner, 1, b"%d" % j)
            b.hub.send_note(b.owner, 1, b"and back")
            assert (await a.hears(core.Noted)).note == b"and back"
            a.hub.lane_down(a.link.number, LANES, "it broke")
            for end in (a, b):
                await end.hears(core.LinkLost)


async def test_a_burst_that_has_seen_enough_is_no_handshake_that_failed(office: Office) -> None:
    """It ends in the middle of what it announced, and takes back what has not left."""
    papers = office.papers("d1")
    with capture_logs() as said:
        async with ends_of(papers, office.papers("d2")) as (_, b):
            connection = await Connector(lambda: papers).dial([b.address], "d2", 5.0)
            with closing(connection):
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await connection.send_all(encode(m.ProbeHello(PROTOCOL_VERSION, "d2", 1 << 20)) + bytes(1000))
                await trio.testing.wait_all_tasks_blocked(0.05)  # it is answered
            await trio.testing.wait_all_tasks_blocked(0.05)
    assert [one for one in said if "handshake" in one["event"]] == []


def papers_of(papers: Papers) -> bytes:
    return Path(papers.certificate).read_bytes()


WRONG = {
    "another daemon's": ("d3", "d2", "of peer d3: is that address its own"),
    "not a peer's": ("d1", "observer", "observer d2"),
    "expired": ("old", "d2", "has expired, and its key was not known here while it was good"),
    "not valid yet": ("early", "d2", "look at the clocks of both machines"),
    "another authority's": ("stranger", "d2", "of another authority than|does not believe this daemon's"),
    "none": ("none", "d2", "does not speak TLS|speaks TLS only"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_who_has_not_the_right_certificate_is_refused_and_both_ends_say_why(
    what: str, office: Office, tmp_path: Path
) -> None:
    first, second, reason = WRONG[what]
    made: Papers | None
    match first:
        case "old":
            made = office.papers("d1", at=-5000.0, lifetime=1000.0)
        case "early":
            made = office.papers("d1", at=5000.0)
        case "stranger":
            made = Office(tmp_path, "strangers").papers("d1")
        case "none":
            made = None
        case _:
            made = office.papers(first)
    other = office.papers("d2", "observer" if second == "observer" else "peer")
    async with ends_of(made, other) as (a, b):
        seen = ""
        while not seen:  # each dials in turn, and each has its own word for it
            await trio.sleep(0.02)
            said = [end.link.reason for end in (a, b) if end.link.reason and "has not dialled" not in end.link.reason]
            seen = next((one for one in said if any(word in one for word in reason.split("|"))), "")
        assert not a.link.up
        assert not b.link.up


@pytest.mark.parametrize(
    ("openssl", "ours"),
    [
        ("TLS: wrong version number", "it does not speak TLS: that daemon was started without certificates"),
        ("TLS: packet length too long", "it does not speak TLS: that daemon was started without certificates"),
        ("TLS: http request", "it does not speak TLS: that daemon was started without certificates"),
        ("TLS: the other end says: unknown CA", "it does not believe this daemon's certificate: both have to come"),
        ("TLS: the other end says: bad certificate", "the certificate shown is refused, as a rule since it is"),
        ("TLS: certificate verify failed: unable to get local issuer certificate", "its certificate is of another a"),
        ("TLS: certificate verify failed: certificate has expired", "its certificate has expired: look at the clocks"),
        ("TLS: certificate verify failed: unsupported certificate purpose", "its certificate is for other purposes"),
        ("TLS: the other end says: unsupported certificate", "the certificate shown is for other purposes"),
        ("cut off: the connection ended without a close notify", "the connection was cut: that daemon has ended"),
        ("Connection refused", "Connection refused"),
    ],
)
def test_what_tls_says_between_daemons_says_what_to_do(openssl: str, ours: str) -> None:
    told = connections._explained(OSError(5, openssl))
    assert told.startswith(ours)
    assert told == ours or told.endswith(f" ({openssl})")


def believing(folder: Path, papers: Papers, *authorities: Authority) -> Papers:
    """The same, but that these are believed."""
    path = folder / f"{Path(papers.certificate).name}.believed"
    path.write_bytes(b"".join(one.certificate for one in authorities))
    return replace(papers, authorities=str(path))


async def test_ends_of_a_link_may_have_certificates_of_two_authorities_until_one_is_dropped(
    office: Office, tmp_path: Path
) -> None:
    other = Office(tmp_path, "new")
    old, new = office.authority, other.authority
    first = believing(tmp_path, office.papers("d1"), old, new)
    second = believing(tmp_path, other.papers("d2"), new, old)
    async with ends_of(first, second) as (a, b):
        for end in (a, b):
            await end.hears(core.LinksUp)
        believing(tmp_path, second, new)  # d2 is told that the old one is dropped; d1 has not renewed
        a.hub.lane_down(a.link.number, LANES, "it broke")
        for end in (a, b):
            await end.hears(core.LinkLost)
        said = ""
        while "unable to get local issuer" not in said and "self-signed" not in said:
            await trio.sleep(0.02)
            said = b.link.reason
        assert not b.link.up
        renewed = other.papers("d1")
        for file in ("certificate", "key"):
            shutil.copy2(getattr(renewed, file), getattr(first, file))
        for end in (a, b):
            await end.hears(core.LinksUp)


async def test_a_live_link_is_replaced_only_by_the_daemon_whose_member_it_leads_to(office: Office) -> None:
    async with ends_of(office.papers("d1"), office.papers("d2")) as (a, b):
        for end in (a, b):
            await end.hears(core.LinksUp)
        number, epoch = a.link.number, a.owner.epoch
        assert epoch is not None
        plan = core.wire_plan(epoch)
        hello = m.LaneHello(PROTOCOL_VERSION, "g", KEY, 2, 1, core.COLLECTIVES, plan, 0, 1000)
        thief = Connector(lambda: office.papers("d3"))
        connection = await thief.dial([a.address], "d1", 5.0)
        with closing(connection), pytest.raises(DialFailed, match="a member of daemon d2, not of d3"):
            await greet(connection, hello, "a")
        with closing(Connection(await _tcp(a.address))) as plain:
            await plain.send_all(encode(hello))
            answer = await read_frame(plain, m.LaneAnswer, who="a")
            assert isinstance(answer, m.LaneRefused)
            assert "speaks TLS only" in answer.reason
        assert (a.link.up, a.link.number) == (True, number)


async def _tcp(address: str) -> trio.SocketStream:
    host, port = address.rsplit(":", 1)
    return await trio.open_tcp_stream(host, int(port))


@pytest.mark.check
async def test_within_an_epoch_a_certificate_is_good_for_who_knew_it_before_it_expired(office: Office) -> None:
    """A master that is away renews none."""
    soon = office.papers("d1", lifetime=6.0)
    until = times(papers_of(soon))[1]
    async with ends_of(soon, office.papers("d2")) as (a, b):
        for end in (a, b):
            await end.hears(core.LinksUp)
        while time.time() <= until + 1:  # noqa: ASYNC110 - the clock
            await trio.sleep(0.05)
        assert a.hub.connector.seals() is not None
        for end in (a, b):  # each has lost a lane: whoever dials
            end.hub.lane_down(end.link.number, LANES, "it broke")
        for end in (a, b):
            await end.hears(core.LinkLost)
        for end in (a, b):
            await end.hears(core.LinksUp)
        assert await probe(a.hub.connector, [b.address], "d2", DEFAULT) is not None  # for lanes alone
        stranger = Connector(lambda: office.papers("d1", at=-5000.0, lifetime=1000.0))  # the name, with another key
        connection = await stranger.dial([b.address], "d2", 5.0)
        epoch = a.owner.epoch
        assert epoch is not None
        hello = m.LaneHello(PROTOCOL_VERSION, "g", KEY, 1, 2, core.COLLECTIVES, core.wire_plan(epoch), 0, 1000)
        with (
            closing(connection),
            pytest.raises(DialFailed, match="d1: its certificate has expired, and its key was not"),
        ):
            await greet(connection, hello, "b")


async def test_clocks_may_be_ten_minutes_off(office: Office) -> None:
    """Of the masters that signed, against those of the daemons."""
    async with ends_of(office.papers("d1", at=600.0), office.papers("d2", at=-600.0)) as ends:
        for end in ends:
            await end.hears(core.LinksUp)


async def test_probes_prove_who_answers(office: Office) -> None:
    async with ends_of(office.papers("d1"), office.papers("d2")) as (a, _):
        connector = Connector(lambda: office.papers("d2"))
        assert await probe(connector, [a.address], "d1", DEFAULT) is None
        failed = await probe(connector, [a.address], "d5", DEFAULT)
        assert "expected peer d5, its certificate is of peer d1" in str(failed)


async def test_new_papers_are_used_from_the_next_dial_on(office: Office) -> None:
    papers = office.papers("d1", at=-5000.0, lifetime=1000.0)
    connector = Connector(lambda: papers)
    before = connector.seals()
    assert connector.seals() is before
    office.papers("d1")
    assert connector.seals() is not before


def test_papers_that_cannot_be_used_are_refused_with_the_reason(office: Office) -> None:
    papers = office.papers("d1")
    texts = [Path(path).read_bytes() for path in (papers.authorities, papers.certificate, papers.key)]
    Seals(*texts)
    for place, what in enumerate(("authorities", "certificate", "key")):
        with pytest.raises(ConfigError, match=f"the {what}: "):
            Seals(*(b"nothing" if i == place else text for i, text in enumerate(texts)))
    with pytest.raises(ConfigError, match="key"):
        Seals(*texts[:2], new_key())
    Path(papers.key).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Connector(lambda: papers).seals()

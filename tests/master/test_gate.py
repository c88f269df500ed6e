"""The real master over TLS: whose key is let in, by which receipt or token, and what it says to all others."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from tests.master.dialler import Dialled, secure
from tests.master.test_master import hello
from wancoll.errors import ConfigError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import split_address
from wancoll.net.ask import ask
from wancoll.net.proof import Proof, make_receipt, read_receipt
from wancoll.trust.identity import Identity
from wancoll.trust.keys import Key
from wancoll.wire import messages as m
from wancoll.wire.framing import encode_body
from wancoll.wire.kept import counts
from wancoll_master.config import MasterConfig
from wancoll_master.serve import serve

STATUS = m.StatusRequest(PROTOCOL_VERSION)
LIST = m.ListTokens(PROTOCOL_VERSION)


async def test_a_token_admits_a_key_which_needs_none_from_then_on(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        assert master.token is not None
        assert (master.token.address, master.token.master.hex()) == (master.address, master.keys[-1])
        proof, admitted = await master.join("d")
        assert admitted.keys == [master.token.master]
        who = read_receipt(admitted.receipt, proof.key.public, admitted.keys)
        assert who == Identity("d", "peer", (), master.token.id, proof.key.public)
        assert await master.ask(replace(proof, receipt=b""), hello("d"), m.Admitted) == admitted
        reason = await master.refused(proof, hello("another"))
        assert "may not say Hello as another; expected the name d" in reason
        assert "has a key that this master does not know" in await master.refused(
            Proof(Key.new(), (), b"", "d"), STATUS
        )
        assert (await master.do(LIST)).tokens[0].used == 0  # it may come any number of times
    assert not (tmp_path / "state" / "admin.key").exists()
    async with secure(tmp_path) as again:  # the same key, tokens and names
        assert again.token is None
        assert again.keys == master.keys
        assert isinstance(await again.ask(replace(proof, receipt=b""), hello("d"), m.Welcome), m.Welcome)


@pytest.mark.parametrize(
    ("more", "name", "says"),
    [
        ({"seconds": 0.001}, "d", "has expired"),
        ({"uses": 1}, "d", "is used up"),
        ({"name": "e"}, "d", "is for another name; expected e"),
        ({}, "taken", "cannot give this name, which is another daemon's"),
        ({}, "", "is for somebody with a name"),
        ({"secret": "x"}, "d", "is not known, or its secret is wrong"),
        ({"id": "ffff"}, "d", "is not known, or its secret is wrong"),
        ({"revoked": True}, "d", "is revoked"),
    ],
)
async def test_a_token_that_is_not_good_is_refused(tmp_path: Path, more: dict[str, Any], name: str, says: str) -> None:
    async with secure(tmp_path) as master:
        await master.join("taken")
        wrong = {key: more.pop(key) for key in ("secret", "id", "revoked") if key in more}
        token = await master.make(**more)
        if more.get("uses"):
            proof, _ = await master.join("first", token)
            await master.join("first", token, proof.key)  # the same one is counted once
        if "revoked" in wrong:
            await master.do(m.RevokeToken(PROTOCOL_VERSION, token.id))
        id, secret = wrong.get("id", token.id), wrong.get("secret", "") + token.secret
        proof = Proof(Key.new(), (), b"", name, f"{id}.{secret}")
        assert says in await master.refused(proof, hello(name or "d"))
        shown = {one.id: one.used for one in (await master.do(LIST)).tokens}
        assert shown[token.id] == more.get("uses", 0)


async def test_the_token_that_is_shown_counts_not_that_of_before(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        proof, _ = await master.join("d")
        other = await master.make(groups=["g"])
        told = await master.ask(replace(proof, token=other.shown), hello("d"), m.Admitted)
        who = read_receipt(told.receipt, proof.key.public, told.keys)
        assert who == Identity("d", "peer", ("g",), other.id, proof.key.public)


@pytest.mark.parametrize("how", ["ended", "unknown", "used up"])
async def test_whoever_was_admitted_comes_in_with_whatever_token_it_is_started(tmp_path: Path, how: str) -> None:
    """A service file has the token of the day it was written; its machine has a receipt, or is known."""
    async with secure(tmp_path) as master:
        proof, _ = await master.join("d")
        if how == "unknown":
            shown = "ffff." + "x" * 43
        else:
            token = await master.make(**({"seconds": 0.001} if how == "ended" else {"uses": 1}))
            shown = token.shown
            if how == "used up":
                await master.join("e", token)
        told = await master.ask(replace(proof, token=shown, receipt=b""), hello("d"), m.Admitted)
        assert read_receipt(told.receipt, proof.key.public, told.keys).token == master.token.id  # type: ignore[union-attr]
        assert "token" in await master.refused(Proof(Key.new(), (), b"", "f", shown), hello("f"))


async def test_a_daemon_that_is_here_keeps_its_name_against_a_token_for_it(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        proof, _ = await master.join("d")
        token = await master.make(name="d")
        async with master.dial() as first:
            await first.prove(proof, hello("d"))
            await first.expect(m.Admitted)
            other = Proof(Key.new(), (), b"", "d", token.shown)
            answer = await master.ask(other, hello("d"), m.Bye | m.Welcome)
            assert isinstance(answer, m.Bye)
            assert (answer.final, "is for a name whose daemon is here" in answer.reason) == (False, True)
            await master.do(m.RevokeToken(PROTOCOL_VERSION, token.id))  # all who are here are looked at
            await first.say(m.Heartbeat(number=7, heard=0))
            assert (await first.expect(m.Pong)).number in (0, 7)


async def test_a_receipt_counts_where_the_journal_is_lost_and_no_other_does(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        assert master.token is not None
        proof, _ = await master.join("d")
        stolen, _ = await master.join("e")
        token = master.token.id
    (tmp_path / "journal").unlink()
    async with secure(tmp_path) as master:
        unknown = "has a key that this master does not know"
        mine = Identity("d", "peer", (), token, proof.key.public)
        for forged in (
            b"",
            b"\xff",
            stolen.receipt,  # for another key
            make_receipt([Key.new()], mine),  # by another master
            encode_body(
                msgspec.structs.replace(msgspec.msgpack.decode(proof.receipt, type=m.KeyReceipt), role="admin")
            ),
        ):
            assert unknown in await master.refused(replace(proof, receipt=forged), hello("d"))
        assert unknown in await master.refused(replace(proof, name="f"), hello("f"))  # for another name
        told = await master.ask(proof, hello("d"), m.Admitted)
        assert read_receipt(told.receipt, proof.key.public, told.keys) == mine
        assert isinstance(await master.ask(replace(proof, receipt=b""), hello("d"), m.Welcome), m.Welcome)
        await master.do(m.RevokeToken(PROTOCOL_VERSION, token))  # which it knows from the receipt
        assert "by which it came in is revoked" in await master.refused(proof, hello("d"))
        assert "by which it came in is revoked" in await master.refused(stolen, hello("e"))


@pytest.mark.parametrize("what", ["token", "key"])
async def test_whoever_is_revoked_is_sent_away_and_nobody_else(tmp_path: Path, what: str) -> None:
    async with secure(tmp_path) as master, contextlib.AsyncExitStack() as stack:
        here: dict[str, Dialled] = {}
        proofs: dict[str, Proof] = {}
        for name in ("d", "e"):
            proofs[name], _ = await master.join(name, await master.make())
            here[name] = await stack.enter_async_context(master.dial())
            await here[name].prove(proofs[name], hello(name))
            await here[name].expect(m.Admitted)
        tokens = {one.id: one for one in (await master.do(LIST)).tokens}
        who = read_receipt(proofs["d"].receipt, proofs["d"].key.public, [bytes.fromhex(master.keys[0])])
        assert who is not None
        assert who.token in tokens
        revoke = m.RevokeToken(PROTOCOL_VERSION, who.token) if what == "token" else m.RevokeKey(PROTOCOL_VERSION, "d")
        await master.do(revoke)
        says = "by which it came in is revoked" if what == "token" else "has a key that an operator has revoked"
        assert says in await here["d"].end()
        assert says in await master.refused(proofs["d"], hello("d"))
        await here["e"].say(m.Heartbeat(number=7, heard=0))
        assert (await here["e"].expect(m.Pong)).number == 7
        if what == "key":  # also with a good token; another key may have the name
            assert says in await master.refused(replace(proofs["d"], token=(await master.make()).shown), hello("d"))
        await master.join("d")
        none = msgspec.structs.replace(revoke, **{"token" if what == "token" else "name": "none"})
        refused = (await master.ask(master.admin, none, m.Tokens | m.KeysAre)).refused
        assert ("there is no such token" if what == "token" else "is no daemon that was admitted here") in refused
    async with secure(tmp_path) as master:  # the next one knows
        assert says in await master.refused(proofs["d"], hello("d"))


async def test_a_first_message_counts_for_this_master_connection_purpose_and_words_alone(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        proof, _ = await master.join("d")
        other = Key.new()
        bad = "has not signed its first message with its key"
        for wrong in (
            {"key": other.public},
            {"signature": bytes(64)},
            {"name": "e"},
            {"token": (await master.make()).shown},
            {"receipt": b""},
            {"body": encode_body(hello("d", 2))},
            {"body": encode_body(STATUS)},  # another purpose, too
        ):
            answer = await master.ask(proof, hello("d"), m.Bye | m.Welcome | m.Status, **wrong)
            assert isinstance(answer, m.Bye)
            assert bad in answer.reason
        async with master.dial() as one, master.dial() as two:  # a challenge of another connection
            signed = proof.first(two.master, await one.challenged(), hello("d"))
            await two.challenged()
            await two.say(signed)
            assert bad in await two.end()
        async with master.dial() as relayed:  # a rogue acceptor has it signed for itself
            await relayed.say(proof.first(other.public, await relayed.challenged(), hello("d")))
            assert bad in await relayed.end()


async def test_without_a_proof_nothing_is_read_or_changed(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        proof, _ = await master.join("d")
        for message in (hello("d"), STATUS, LIST, m.RotateKey(PROTOCOL_VERSION, now=True)):
            async with master.dial() as stranger:
                await stranger.say(message)
                assert f"may not begin with {type(message).__name__} over TLS; expected Signed" in await stranger.end()
        async with master.dial() as twice:
            await twice.prove(proof, hello("d"))
            await twice.expect(m.Welcome)
            await twice.prove(proof, hello("d"))
            assert "signs a message that is not its first" in await twice.end()
        async with master.dial() as nested:
            inner = proof.first(nested.master, await nested.challenged(), hello("d"))
            await nested.prove(proof, inner)
            assert "got Invalid value 'Signed'" in await nested.end()
        for admins in (LIST, m.RotateKey(PROTOCOL_VERSION, now=True), m.RevokeKey(PROTOCOL_VERSION, "d")):
            answer = await master.ask(proof, admins, m.Bye | m.Tokens | m.KeysAre)
            assert isinstance(answer, m.Bye)
            assert f"may not say {type(admins).__name__}" in answer.reason
        assert len((await master.do(LIST)).tokens) == 1


async def test_another_version_is_told_so_before_it_says_anything(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        for version in ("", f"wancoll/{PROTOCOL_VERSION + 1}"):
            async with master.dial(version=version) as older:
                first = await older.hear()
                assert isinstance(first, m.Bye)
                assert not first.final, "a daemon that runs is back once both are alike"
                assert "speaks another version of the protocol" in first.reason
                assert "run the same wancoll version everywhere" in first.reason


async def test_an_admin_of_one_run_is_none_of_the_next(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        before = master.admin
        async with master.dial() as daemon:  # it may say all, but gets nothing to show later
            await daemon.prove(before, hello("admin"))
            await daemon.expect(m.Welcome)
            await daemon.say(m.Heartbeat(number=7, heard=0))
            while not isinstance(said := await daemon.hear(), m.Pong):
                assert not isinstance(said, m.Admitted)
    async with secure(tmp_path) as master:
        answer = await master.ask(before, LIST, m.Bye | m.Tokens)
        assert isinstance(answer, m.Bye)
        assert "has a key that this master does not know" in answer.reason
        assert (await master.do(LIST)).tokens


async def test_a_token_for_one_group_makes_no_tokens(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        token = await master.make(role="admin", groups=["g"])
        proof = Proof(Key.new(), (), b"", "a", token.shown)
        answer = await master.ask(proof, LIST, m.Tokens)
        assert "may not look after tokens and keys; expected an admin of all groups; got g" in answer.refused
        answer = await master.ask(proof, m.RotateKey(PROTOCOL_VERSION, now=True), m.KeysAre)
        assert "may not look after tokens and keys" in answer.refused


async def test_a_token_whose_receipt_would_not_fit_is_refused_when_it_is_made(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        large = m.MakeToken(PROTOCOL_VERSION, "peer", "", [f"{i:0>128}" for i in range(64)], 0, 0.0)
        assert (await master.do(large)).made
        large = m.MakeToken(
            PROTOCOL_VERSION, "peer", "", ["\N{GRINNING FACE}" * 120 + str(i) for i in range(64)], 0, 0.0
        )
        answer = await master.ask(master.admin, large, m.Tokens)
        assert "asks for a receipt that is too large" in answer.refused


async def test_a_state_folder_is_one_masters(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        for secured in (True, False):
            other = MasterConfig(listen="127.0.0.1:0", journal="", state=str(tmp_path / "state"), secure=secured)
            with pytest.raises(ConfigError, match="is the state folder of another master, which runs"):
                await serve(other)
            assert (await master.do(LIST)).tokens


async def test_a_master_in_clear_and_a_daemon_over_tls_say_what_is_wrong(tmp_path: Path) -> None:
    admin = tmp_path / "state" / "admin.key"  # of a master that was killed: commands would ask this one as its admin
    admin.parent.mkdir()
    admin.touch()
    asked = partial(ask, answers=m.FromMaster, timeout=20, who="the master")
    async with secure(tmp_path, secure=False) as master:
        assert not admin.exists()
        proof = Proof(Key.new(), (bytes(32),))
        with pytest.raises(ConnectionError, match="it does not speak TLS: either it was started in clear"):
            await trio.to_thread.run_sync(partial(asked, split_address(master.address), LIST, proof=proof))
        answer = await trio.to_thread.run_sync(partial(asked, split_address(master.address), LIST))
        assert "asks for tokens or keys of a master without TLS; start the master with --secure" in answer.reason
        peer = Dialled(await trio.open_tcp_stream(*split_address(master.address)), bytes(32))
        await peer.say(proof.first(bytes(32), bytes(32), hello("d")))
        assert "signs a message that is not its first, or in clear" in await peer.end()
        await trio.aclose_forcefully(peer.stream)
    async with secure(tmp_path) as master:
        answer = await trio.to_thread.run_sync(partial(asked, split_address(master.address), STATUS))
        assert answer == m.Bye(
            "this master speaks TLS only; give --join or WANCOLL_JOIN a token: `wancoll token create` makes one", True
        )


async def test_a_token_for_one_group_reads_and_changes_nothing_of_another(tmp_path: Path) -> None:
    """As a daemon and as an observer; the other group's member is there meanwhile."""
    async with secure(tmp_path) as master, master.dial() as daemon:
        theirs, _ = await master.join("b", await master.make(groups=["theirs"]))
        mine, _ = await master.join("a", await master.make(groups=["mine"]))
        eyes = Proof(Key.new(), (), b"", "eyes", (await master.make(role="observer", groups=["mine"])).shown)
        await daemon.prove(theirs, hello("b"))
        await daemon.say(m.Join("theirs", "m", 2, 1))
        await daemon.expect(m.Joined)
        for proof in (mine, eyes):
            answer = await master.ask(proof, STATUS, m.Status)
            assert (answer.groups, answer.daemons, answer.links, answer.resources) == ([], [], [], {})
            assert all(event.group == "mine" for event in answer.events)
            evict = m.Evict(PROTOCOL_VERSION, "theirs", "m", False, "")
            assert not (await master.ask(proof, evict, m.EvictAnswer)).done
        assert "may not say Arm" in (await master.ask(mine, m.Arm("t", "before_commit", "kill"), m.Bye)).reason
        assert "may not say Hello; expected the role peer" in await master.refused(eyes, hello("eyes"))
        elsewhere = msgspec.structs.replace(hello("a"), addresses=["192.0.2.1:22"])
        assert "not its own" in (await master.ask(mine, elsewhere, m.Bye)).reason
        known = await master.ask(master.admin, STATUS, m.Status)
        [group] = known.groups
        assert [one.name for one in group.members] == ["m"]
        assert known.resources["messages_refused"] == 4


async def test_what_proves_a_key_is_not_said_again_to_who_comes_back(tmp_path: Path) -> None:
    """Daemons do not count it among what they have heard, so a master that did would say something twice."""
    async with secure(tmp_path) as master, contextlib.AsyncExitStack() as connections:
        proof, _ = await master.join("d")

        async def talk(last: type, first: m.Hello, *words: Any) -> list[Any]:
            """All that is heard over a new connection up to one that is the *last*."""
            peer, heard = await connections.enter_async_context(master.dial()), list[Any]()
            await peer.prove(proof, first)
            await peer.say(*words)
            while not (heard and isinstance(heard[-1], last)):
                heard.append(await peer.hear())
            return heard

        welcome, admitted, *more = await talk(m.Joined, hello("d"), m.Join("g", "m", 2, 1))
        assert (type(welcome), type(admitted)) == (m.Welcome, m.Admitted)
        known = {"master": welcome.master, "session": welcome.session, "dial": 1}
        heard = sum(map(counts, more))
        back = msgspec.structs.replace(hello("d"), heard=heard - 1, **known)
        welcome, *again = await talk(m.Joined, back)
        assert welcome.resumed
        assert again == [admitted, more[-1]]
        await master.do(m.RotateKey(PROTOCOL_VERSION))
        back = msgspec.structs.replace(back, heard=heard, dial=2)
        _, admitted, pong = await talk(m.Pong, back, m.Heartbeat(number=7, heard=heard))
        assert (len(admitted.keys), pong.number) == (2, 7)

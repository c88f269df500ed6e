"""What a dialler signs: for one acceptor, connection, purpose and message, and for nobody else's use."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from wancoll.errors import ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net import proof
from wancoll.net.proof import Proof, check_first, make_receipt, purpose_of, read_receipt
from wancoll.trust.identity import Identity
from wancoll.trust.keys import Key
from wancoll.wire import messages as m
from wancoll.wire.framing import decode_body, encode_body

MASTER, MINE, OTHER = Key.new(), Key.new(), Key.new()
NONCE = os.urandom(32)
PROBE = m.ProbeHello(PROTOCOL_VERSION, "d")
FIRST = Proof(MINE, (OTHER.public,), b"receipt", "d", "id.secret").first(OTHER.public, NONCE, PROBE)


def test_what_was_signed_for_this_end_is_taken() -> None:
    assert check_first(FIRST, OTHER.public, NONCE, m.LaneFirst) == PROBE
    assert (FIRST.key, FIRST.receipt, FIRST.name, FIRST.token) == (MINE.public, b"receipt", "d", "id.secret")


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, body=encode_body(replace(PROBE, nbytes=1))),
        lambda one: replace(one, receipt=b"receipT"),
        lambda one: replace(one, name="e"),
        lambda one: replace(one, token="id.other"),
        lambda one: replace(one, token="", name="did.secret"),
        lambda one: replace(one, key=OTHER.public),
        lambda one: replace(one, signature=bytes(64)),
    ],
)
def test_what_was_changed_is_refused(change: Callable[[m.Signed], m.Signed]) -> None:
    with pytest.raises(ProtocolError, match="x: has not signed its first message with its key"):
        check_first(change(FIRST), OTHER.public, NONCE, m.LaneFirst, who="x")


def test_a_signature_is_good_for_one_acceptor_and_one_challenge() -> None:
    for acceptor, nonce in ((MASTER.public, NONCE), (MINE.public, NONCE), (OTHER.public, os.urandom(32))):
        with pytest.raises(ProtocolError, match="has not signed"):
            check_first(FIRST, acceptor, nonce, m.LaneFirst)


def test_a_signature_is_good_for_one_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(proof._PURPOSES, m.ProbeHello, "lane")
        first = Proof(MINE, ()).first(OTHER.public, NONCE, PROBE)
    assert first.body == encode_body(PROBE)
    with pytest.raises(ProtocolError, match="has not signed"):
        check_first(first, OTHER.public, NONCE, m.LaneFirst)
    with pytest.raises(ProtocolError, match="sent a message that cannot be read"):
        check_first(Proof(MINE, ()).first(OTHER.public, NONCE, PROBE), OTHER.public, NONCE, m.FromPeer)
    firsts = PROBE, m.AskElection(PROTOCOL_VERSION), m.ListTokens(PROTOCOL_VERSION)
    assert [purpose_of(one) for one in firsts] == ["probe", "control", "admin"]


def test_a_proof_within_a_proof_is_no_first_message() -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        check_first(Proof(MINE, ()).first(OTHER.public, NONCE, FIRST), OTHER.public, NONCE, m.LaneFirst)


WHO = Identity("node 7/ü", "observer", ("a", "b,c"), "tok1", MINE.public)


def test_a_receipt_says_who_the_owner_of_a_key_is_by_any_master_that_signed() -> None:
    receipt = make_receipt([MASTER, OTHER], WHO)
    for masters in ([MASTER.public], [OTHER.public], [Key.new().public, OTHER.public]):
        assert read_receipt(receipt, MINE.public, masters) == WHO
    for key, masters in (
        (OTHER.public, [MASTER.public]),  # of another key
        (MINE.public, [Key.new().public]),  # by another master
        (MINE.public, [MINE.public]),  # by nobody
        (MINE.public, []),
    ):
        assert read_receipt(receipt, key, masters) is None
    assert read_receipt(make_receipt([MINE], WHO), MINE.public, [MASTER.public]) is None, "by its owner"
    assert read_receipt(make_receipt([], WHO), MINE.public, [MASTER.public]) is None


@pytest.mark.parametrize(
    "changed", [{"name": "x"}, {"role": "admin"}, {"groups": []}, {"groups": ["ab,c"]}, {"token": ""}]
)
def test_a_receipt_that_was_changed_is_none(changed: dict[str, object]) -> None:
    found = decode_body(make_receipt([MASTER], WHO), m.KeyReceipt)
    assert read_receipt(encode_body(found), MINE.public, [MASTER.public]) == WHO
    assert read_receipt(encode_body(replace(found, **changed)), MINE.public, [MASTER.public]) is None


@pytest.mark.parametrize("receipt", [b"", b"\xc1", b"\x80", encode_body(PROBE)])
def test_what_is_no_receipt_is_none(receipt: bytes) -> None:
    assert read_receipt(receipt, MINE.public, [MASTER.public]) is None


def test_a_receipt_is_no_signature_of_a_first_message_and_the_other_way_round() -> None:
    """The master signs receipts, and commands that it sends itself: by the same key."""
    unsigned = replace(decode_body(make_receipt([MASTER], WHO), m.KeyReceipt), signatures=[])
    first = replace(FIRST, key=MASTER.public, signature=MASTER.sign(proof._receipt_text(unsigned)))
    with pytest.raises(ProtocolError, match="has not signed"):
        check_first(first, OTHER.public, NONCE, m.LaneFirst)

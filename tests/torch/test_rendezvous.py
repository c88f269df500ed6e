"""How ranks meet through a store that holds what others left in it."""

import threading
import time

import pytest
from torch.distributed import HashStore

import wancoll
from wancoll.torch.backend.rendezvous import Answer, Cluster


class Hello(Cluster):
    """Says hello and answers; there is no daemon, and no master."""

    def _open(self, deadline):
        return Answer("run", ["127.0.0.1:1"])

    def _find_daemon(self, deadline):
        return ""


@pytest.mark.parametrize("stale", [b"\xff\xfe", b"x" * 16 + b"/", "\u00e9".encode() * 8])
def test_what_others_left_under_hello_does_not_end_the_answers(stale):
    store = HashStore()
    store.set("hello/2", stale)
    first = Hello(store, 0, 3, 10.0)
    try:
        while store.get("hello/2"):
            time.sleep(0.01)
        assert Hello(store, 1, 3, 10.0)._answer == first._answer
    finally:
        first.met()


@pytest.mark.parametrize("said", [b"nonsense", b"[1]", b"\xff", b'{"run": "\xff", "masters": []}'])
def test_an_answer_that_cannot_be_read_is_named(said):
    store = HashStore()

    def answer():
        store.wait(["hello/1"])
        store.set("answer/" + store.get("hello/1").decode(), said)

    other = threading.Thread(target=answer)
    other.start()
    with pytest.raises(wancoll.ProtocolError, match="rank 1"):
        Hello(store, 1, 2, 10.0)
    other.join()


@pytest.mark.check
def test_where_ranks_may_be_far_apart_they_join_with_a_token_of_this_run():
    """A store that names no host: the private master listens on all interfaces, so it lets in no strangers."""
    store, found = HashStore(), {}

    def rank(number):
        found[number] = Cluster(store, number, 2, 60.0)

    other = threading.Thread(target=rank, args=(1,))
    other.start()
    rank(0)
    other.join()
    try:
        assert found[0]._answer == found[1]._answer
        token = found[0]._answer.token
        assert token.startswith("WC2")
        for each in found.values():
            pid = each._daemon._process.pid
            with open(f"/proc/{pid}/environ", "rb") as variables:
                assert f"WANCOLL_JOIN={token}".encode() in variables.read().split(b"\0")
        comms = [None, None]

        def join(number):
            comms[number] = found[number].join("g", number, 2, 60.0)

        other = threading.Thread(target=join, args=(1,))
        other.start()
        join(0)
        other.join()
        assert [comm.world_size for comm in comms] == [2, 2]
        for comm in comms:
            comm.close()
    finally:
        for number in (1, 0):
            found[number].close(wait=False)


def test_on_one_machine_ranks_need_no_token(monkeypatch):
    monkeypatch.setattr("wancoll.torch.backend.rendezvous.host_of", lambda store: "127.0.0.1")
    alone = Cluster(HashStore(), 0, 1, 60.0)
    try:
        assert alone._answer.token == ""
        assert [each.partition(":")[0] for each in alone._answer.masters] == ["127.0.0.1"]
    finally:
        alone.close(wait=False)


def test_a_token_in_the_environment_names_the_master_and_stays_there(monkeypatch):
    for name in ("WANCOLL_SOCKET", "WANCOLL_MASTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANCOLL_JOIN", f"WC2{'0' * 64}::abab.{'s' * 43}@far:7")
    monkeypatch.setattr(Cluster, "_find_daemon", lambda self, deadline: "")
    found = Cluster(HashStore(), 0, 1, 10.0)
    found.met()
    assert found._answer.masters == ["far:7"]
    assert found._answer.token == ""

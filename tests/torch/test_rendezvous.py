"""How ranks meet through a store that holds what others left in it."""

import threading
import time

import pytest
from torch.distributed import HashStore

import wancoll
from wancoll.torch.rendezvous import Answer, Cluster


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

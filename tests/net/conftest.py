"""What tests of TLS share: a master's key, and what a stranger shows."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import pytest

from wancoll.net.tls import Listening
from wancoll.trust.folder import in_memory
from wancoll.trust.keys import Key


@pytest.fixture(scope="package")
def key() -> Key:
    """A master's."""
    return Key.new()


@pytest.fixture(scope="package")
def listening(key: Key) -> Listening:
    """That master."""
    return Listening([key])


def showing(certificates: Sequence[bytes], key: bytes) -> ssl.SSLContext:
    """An acceptor's that shows these."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with in_memory(b"".join(certificates) + key) as file:
        context.load_cert_chain(file)
    return context

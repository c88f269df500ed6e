"""What tests of TLS share: a master's key."""

from __future__ import annotations

import pytest

from wancoll.net.tls import Listening
from wancoll.trust.keys import Key


@pytest.fixture(scope="package")
def key() -> Key:
    """A master's."""
    return Key.new()


@pytest.fixture(scope="package")
def listening(key: Key) -> Listening:
    """That master."""
    return Listening([key])

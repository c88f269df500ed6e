"""What tests of TLS share: a master's papers."""

from __future__ import annotations

import time

import pytest

from wancoll.trust.authority import Authority, Request, new_key, request
from wancoll.trust.papers import Papers, write_secret


@pytest.fixture(scope="package")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """A master's."""
    folder, now, key = tmp_path_factory.mktemp("papers"), time.time(), new_key()
    authority = Authority.make(now)
    write_secret(str(folder / "ca"), authority.certificate)
    write_secret(str(folder / "m"), authority.sign_master(Request.read(request(key)), now, 3600) + key)
    return Papers(str(folder / "ca"), str(folder / "m"))

"""A lease in etcd that a machine which stands still does not lose, and masters that are quick all the same."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from wancoll_master import election

TTL = 5.0  # seconds


@contextmanager
def quick_elections() -> Iterator[None]:
    """Standbys look as often as with a short lease, and who is stopped has time to give its own back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(election, "_LOOKS_PER_TTL", 10 * TTL)
        patch.setattr(election, "_REVOKE_TIMEOUT", 30.0)
        yield

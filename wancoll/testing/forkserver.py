"""What multiprocessing's fork server imports before it forks: all that a service or a client needs, and its tie to us.

Imported by the fork server alone: whoever imports this ends with the thread that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from wancoll.process import die_with_parent

for _module in (
    "numpy",
    "wancoll.cli.running.logs",
    "wancoll.cli.main",
    "wancoll.cli.running.master",
    "wancoll.cli.running.peer",
    "wancoll.cli.running.service",
    "wancoll.client.connect",
    "wancoll.peer.daemon",
    "wancoll_master.election",
    "wancoll_master.serve",
):
    with contextlib.suppress(ImportError):  # the election needs an optional package; who needs it says so
        importlib.import_module(_module)
die_with_parent(os.getppid())

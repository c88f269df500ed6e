"""torch's test/distributed/test_c10d_fault_tolerance.py, which FAULT_TOLERANCE names, with the backend UNDER_TEST.

`python -m tests.torch --fault-tolerance FILE` runs it.
"""

import importlib.util
import os

UNDER_TEST = os.environ["UNDER_TEST"]
if UNDER_TEST == "wancoll":
    import wancoll.torch  # noqa: F401

_spec = importlib.util.spec_from_file_location("fault_tolerance", os.environ["FAULT_TOLERANCE"])
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


class TestFaultTolerance(_module._make_fault_tolerance_test_class(UNDER_TEST, "cpu")):  # type: ignore[misc]
    """Its processes import this module by name."""

"""Distributed training over the backend "wancoll", one idea a file: `python -m wancoll.examples.ddp`, and so on."""

import importlib.util
import sys

if sys.argv[0] == "-m" and importlib.util.find_spec("torch") is None:  # Python looks for the file that it shall run
    from wancoll.errors import ConfigError

    print(
        "wancoll: ConfigError:",
        ConfigError(
            "a package that examples need is not installed", who="wancoll.examples", expected="torch (the model)",
            got="no torch", hint="run, in the source folder: pip install '.[torch]'",
        ),
        file=sys.stderr,
    )  # fmt: skip
    sys.exit(2)

"""`python -m wancoll.chaos.launch PARENT ARGUMENTS...` is `wancoll ARGUMENTS...`, tied to process PARENT."""

import sys

from wancoll.chaos.tether import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    from wancoll.cli.main import run

    run(sys.argv[2:])

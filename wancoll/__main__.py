"""`python -m wancoll` is the `wancoll` command."""

from wancoll.cli.main import run

if __name__ == "__main__":
    run()

"""`python -m specdec`: the same as the `specdec` command."""

from specdec.cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())

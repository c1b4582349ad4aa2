"""`python -m specdec`: the same as the `specdec` command."""

from specdec.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

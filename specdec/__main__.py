"""`python -m specdec`: the same as the `specdec` command."""

from specdec.entry import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Run the `specdec` command as `python -m specdec`."""

from specdec.cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())

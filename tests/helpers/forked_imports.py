"""Modules imported once, by the process that `forked` forks, to run and serve a model."""

from __future__ import annotations

import os
from contextlib import suppress

os.environ["OMP_NUM_THREADS"] = "1"  # libraries read it when they are loaded

from specdec.cli.libraries import import_for_good
from specdec.run_options import RunOptions

import_for_good(RunOptions("pair:target", "pair:draft"))
for _module in ("specdec.cli.app", "specdec.serve.run", "specdec.batch.run", "specdec.api"):
    with suppress(ImportError):  # an extra that is not installed
        __import__(_module)

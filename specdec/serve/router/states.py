"""States of a server's models."""

from __future__ import annotations

from typing import Literal

ModelState = Literal[
    "unloaded", "waiting", "starting", "ready", "restarting", "failing", "failed", "unloading"
]
UNLOADED: ModelState = "unloaded"
WAITING: ModelState = "waiting"
"""State while other models are unloaded for it."""
STARTING: ModelState = "starting"
READY: ModelState = "ready"
RESTARTING: ModelState = "restarting"
"""State after the engine's process ended, until it is loaded again."""
FAILING: ModelState = "failing"
"""State after a request that could not read the model's files; further ones are taken."""
FAILED: ModelState = "failed"
"""State after the engine ended too often in a row: it is not started again."""
UNLOADING: ModelState = "unloading"
REPLICA_STATES = (UNLOADED, STARTING, READY, RESTARTING, FAILED)
"""States that each of several engines of a model has."""

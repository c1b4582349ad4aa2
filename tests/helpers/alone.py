"""One sequence of a backend, for tests that need no other one."""

from __future__ import annotations

from typing import Any

from backends.contract.backend import Backend


def own(backend: Backend) -> Any:
    """Return the one sequence of this backend; the same one at each call, until it is closed."""
    found = vars(backend).get("_lone_sequence")
    if found is None or found.backend is not backend or getattr(found, "is_closed", False):
        found = vars(backend)["_lone_sequence"] = backend.new_sequence()
    return found

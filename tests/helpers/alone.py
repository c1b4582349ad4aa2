"""The only sequence of a backend, for tests that need no other one."""

from __future__ import annotations

from typing import Any

from backends.contract.backend import Backend


def own(backend: Backend) -> Any:
    """Return the backend's only sequence; the same one at each call, until it is closed."""
    actual = vars(backend).get("_lone_sequence")
    if actual is None or actual.backend is not backend or getattr(actual, "is_closed", False):
        actual = vars(backend)["_lone_sequence"] = backend.new_sequence()
    return actual

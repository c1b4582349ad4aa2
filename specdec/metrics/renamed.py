"""Names of metrics and JSON keys that have changed: the old ones are understood for one release."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

OLD_NAMES = {
    "batch_tokens": "pass_rows",
    "non_layer_bytes": "outer_bytes",
    "num_seqs": "n_texts",
    "batch_tokens_per_pass": "rows_per_pass",
    "pinnable_bytes": "lent_bytes",
    "pinned_bytes": "held_bytes",
    "placement": "residency",
    "draft_placement": "draft_residency",
    "preempted": "set_aside",
    "prefill_tokens": "prompt_rows",
    "sequence_passes": "text_passes",
    "sequences_running": "texts_running",
    "sequences_waiting": "texts_waiting",
    "stored_bytes": "held_bytes",
    "stored_elements": "held_elements",
    "swapped_in": "restored",
    "swapped_in_tokens": "restored_tokens",
}
"""Old name by new name."""


def with_old_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with an entry more for each key that had another name."""
    old = {OLD_NAMES[name]: value for name, value in values.items() if name in OLD_NAMES}
    return {**values, **old}


class RenamedFields:
    """Base of statistics whose fields can be read by their old names, with a warning."""

    def __getattr__(self, name: str) -> Any:
        new = next((n for n, old in OLD_NAMES.items() if old == name and n in dir(type(self))), "")
        if not new:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"{name} is {new} now", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

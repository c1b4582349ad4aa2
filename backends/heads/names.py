"""Names of the tensors of a checkpoint's MTP head, which transformers leaves out of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OWN_TENSORS = re.compile(r"(?:^|\.)mtp\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def mtp_tensors(names: Iterable[str], n_layers: int) -> list[str]:
    """Return the names of an MTP head's tensors: mtp.*, or those of a layer after the last one.

    n_layers: decoder layers of the model.
    """

    def is_own(name: str) -> bool:
        layer = _LAYER.search(name)
        is_after = layer is not None and int(layer[1]) == n_layers
        return is_after or _OWN_TENSORS.search(name) is not None

    return [name for name in names if is_own(name)]

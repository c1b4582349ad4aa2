"""The text and the types of tests of recurrent models on llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from backends.llama.recurrent_backend import RecurrentLlamaBackend

    Load = Callable[..., RecurrentLlamaBackend]
    CountRows = Callable[[RecurrentLlamaBackend], list[int]]

TEXT = np.random.default_rng(0).integers(3, 96, 80).tolist()

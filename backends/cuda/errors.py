"""A GPU's memory that runs out, told as an error of ours: what was wanted, is left, and helps.

torch's allocator refuses what is beyond the promise; the driver refuses what the card no longer
has, because other programs have taken it. The remedies differ, so the two are told apart.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from offload.budget import BudgetExceeded, format_up
from offload.placement.tiers import CUDA_CONTEXT_BYTES
from offload.units import MIB, format_bytes

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_MIN_FREE_BYTES = 64 * MIB
"""With less left on the card, CUDA's libraries find no room for what they do not ask torch for."""


class VramUse(NamedTuple):
    """Of one GPU, bytes."""

    taken_bytes: int
    """By torch's allocator in this process, what it keeps for reuse included."""
    promised_bytes: int
    """What it may take at most."""
    free_bytes: int
    """Of the card, for whoever comes first."""


class VramExceeded(BudgetExceeded):
    """The device's memory, as far as it was promised to this process, does not suffice."""

    def __init__(self, requested_bytes: int, use: VramUse) -> None:
        left = max(0, use.promised_bytes - use.taken_bytes)
        missing = max(MIB, use.taken_bytes + requested_bytes - use.promised_bytes)
        smallest = use.promised_bytes + missing + CUDA_CONTEXT_BYTES
        super().__init__("the GPU", requested_bytes, left, smallest, ledger="VRAM")
        self.args = (_reported(requested_bytes, missing, use),)


def _reported(requested_bytes: int, missing_bytes: int, use: VramUse) -> str:
    requested = f"{format_bytes(requested_bytes)} more" if requested_bytes else "more memory"
    taken = f"{format_bytes(use.taken_bytes)} of the {format_bytes(use.promised_bytes)}"
    if use.free_bytes < max(requested_bytes, _MIN_FREE_BYTES) and requested_bytes <= (
        use.promised_bytes - use.taken_bytes
    ):
        return (
            f"the GPU needs {requested}, but only {format_bytes(use.free_bytes)} of it are free, and "
            f"this process has taken {taken} it may use: end what else uses the GPU, or lower "
            "--vram-budget"
        )
    return (
        f"the GPU needs {requested}, but {taken} it may use are taken: raise --vram-budget by "
        f"{format_up(missing_bytes)}, or lower --ctx-size or the number of draft tokens"
    )


@contextmanager
def no_raw_out_of_memory(use: Callable[[], VramUse]) -> Iterator[None]:
    """Raise VramExceeded instead, with figures, and let go of what the broken pass held."""
    try:
        yield
    except RuntimeError as error:  # OutOfMemoryError is one; CUDA's own libraries raise others
        cause = out_of_memory_in(error)
        if cause is None:
            raise
        exceeded = VramExceeded(requested_bytes(str(cause)), use())
        for item in _chain(error):
            traceback.clear_frames(item.__traceback__)  # they refer to the activations
        raise exceeded from None


def out_of_memory_in(error: BaseException) -> BaseException | None:
    """The error that says so, `error` or one that it followed: a recording that runs out of memory
    ends with another one."""
    for item in _chain(error):
        if any(text in str(item) for text in _OUT_OF_MEMORY):
            return item
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    item: BaseException | None = error
    while isinstance(item, RuntimeError):
        yield item
        item = item.__cause__ or (None if item.__suppress_context__ else item.__context__)


def requested_bytes(message: str) -> int:
    """What torch's out-of-memory message says that was asked for; 0 where it does not say."""
    result = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return 0 if result is None else int(float(result[1]) * _UNITS[result[2]])

"""Out-of-memory errors of a GPU as errors of ours: what was requested, what is left, the remedy.

torch's allocator refuses memory beyond the budget; the driver refuses memory that other programs
have taken. The remedies differ, so the messages do.
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
"""Free memory that CUDA's libraries need for allocations of their own, outside of torch."""


class VramUse(NamedTuple):
    """Memory use of one GPU, in bytes."""

    taken_bytes: int
    """Bytes of torch's allocator in this process, including its cache."""
    promised_bytes: int
    """Maximum that torch's allocator may take: the VRAM budget."""
    free_bytes: int
    """Free bytes of the card, available to any process."""


class VramExceeded(BudgetExceeded):
    """Raised when the VRAM budget of this process, or the card's free memory, does not suffice."""

    def __init__(self, requested_bytes: int, use: VramUse) -> None:
        left = max(0, use.promised_bytes - use.taken_bytes)
        missing = max(MIB, use.taken_bytes + requested_bytes - use.promised_bytes)
        smallest = use.promised_bytes + missing + CUDA_CONTEXT_BYTES
        super().__init__("the GPU", requested_bytes, left, smallest, ledger="VRAM")
        self.args = (_message(requested_bytes, missing, use),)


def _message(requested_bytes: int, missing_bytes: int, use: VramUse) -> str:
    requested = f"{format_bytes(requested_bytes)} more" if requested_bytes else "more memory"
    taken = f"{format_bytes(use.taken_bytes)} of the {format_bytes(use.promised_bytes)}"
    if use.free_bytes < max(requested_bytes, _MIN_FREE_BYTES) and requested_bytes <= (
        use.promised_bytes - use.taken_bytes
    ):
        return (
            f"the GPU needs {requested}, but only {format_bytes(use.free_bytes)} of it are free, "
            f"and this process has taken {taken} it may use: end what else uses the GPU, or lower "
            "--vram-budget"
        )
    return (
        f"the GPU needs {requested}, but {taken} it may use are taken: raise --vram-budget by "
        f"{format_up(missing_bytes)}, or lower --ctx-size or the number of draft tokens"
    )


@contextmanager
def no_raw_out_of_memory(use: Callable[[], VramUse]) -> Iterator[None]:
    """Turn an out-of-memory error into VramExceeded; free the activations of the failed pass."""
    try:
        yield
    except RuntimeError as error:  # OutOfMemoryError is one; CUDA's own libraries raise others
        cause = out_of_memory_in(error)
        if cause is None:
            raise
        exceeded = VramExceeded(requested_bytes(str(cause)), use())
        for link in _chain(error):
            traceback.clear_frames(link.__traceback__)  # the frames refer to the activations
        raise exceeded from None


def out_of_memory_in(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error, `error` or one of its causes: a graph capture that runs out
    of memory ends with another error."""
    for link in _chain(error):
        if any(text in str(link) for text in _OUT_OF_MEMORY):
            return link
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while isinstance(link, RuntimeError):
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def requested_bytes(message: str) -> int:
    """Return the size of the allocation in torch's out-of-memory message; 0 if it names none."""
    match = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return 0 if match is None else int(float(match[1]) * _UNITS[match[2]])

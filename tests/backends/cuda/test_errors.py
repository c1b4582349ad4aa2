"""Running out of GPU memory always raises our error, with the figures and the remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from alone import own
from cpu_engine import CpuEngine
from device_talk import PROMPT, on_device

from backends.contract.backend import PREFIX
from backends.cuda.errors import VramExceeded, VramUse, no_raw_out_of_memory, requested_bytes
from offload.budget import BudgetExceeded
from offload.errors import with_names
from offload.units import GIB, MIB

USED = VramUse(taken_bytes=7 * GIB, promised_bytes=7 * GIB + 10 * MIB, free_bytes=60 * GIB)


def reported(error: BaseException, use: VramUse = USED) -> VramExceeded:
    with pytest.raises(VramExceeded) as raised, no_raw_out_of_memory(lambda: use):
        raise error
    return raised.value


def test_what_is_beyond_the_promise() -> None:
    error = reported(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0")
    )
    names = [with_names(name) for name in ("--vram-budget", "--ctx-size")]
    assert str(error) == (
        "the GPU needs 50.00 MiB more, but 7.00 GiB of the 7.01 GiB it may use are taken: raise "
        f"{names[0]} by 40 MiB, or lower {names[1]} or the number of draft tokens"
    )
    assert (error.requested_bytes, error.left_bytes) == (50 * MIB, 10 * MIB)
    # The user's budget includes CUDA's own share.
    assert error.smallest_budget_bytes == 7 * GIB + (50 + 512) * MIB


@pytest.mark.parametrize(
    ("said", "requested"),
    [
        ("CUDA out of memory. Tried to allocate 5.00 MiB. GPU 0", "5.00 MiB more"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "more memory"),
        ("CUDA error: out of memory\nCUDA kernel errors might be", "more memory"),
    ],
)
def test_what_others_have_taken(said: str, requested: str) -> None:
    """A larger budget would not help."""
    error = reported(RuntimeError(said), USED._replace(free_bytes=3 * MIB))
    assert str(error).startswith(f"the GPU needs {requested}, but only 3.00 MiB of it are free")
    assert str(error).endswith(with_names("end what else uses the GPU, or lower --vram-budget"))


def test_an_error_that_follows_one_is_one() -> None:
    """A graph capture that runs out of memory ends with another error."""
    first = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 50.00 MiB.")
    last = RuntimeError("operation failed due to a previous error during capture")
    last.__context__ = first
    assert reported(last).requested_bytes == 50 * MIB
    last.__suppress_context__ = True  # the error was handled
    with pytest.raises(RuntimeError, match="previous error"):
        reported(last)


def test_out_of_memory_in_mid_pass_is_our_error_and_leaves_the_prefix(checkpoint_factory) -> None:
    """Raise torch's own out-of-memory error at every layer of a pass."""
    with on_device(checkpoint_factory("llama"), CpuEngine()) as backend:
        own(backend).prefill(PROMPT)
        _, expected = own(backend).extend([7, 9], [PREFIX, PREFIX])
        own(backend).rollback(len(PROMPT))
        for runner in backend._runner.layers:
            forward = runner._forward

            def failing(*args: object, forward=forward, **kwargs: object) -> object:
                forward(*args, **kwargs)
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity"
                )

            runner._forward = failing
            with pytest.raises(
                BudgetExceeded, match="20.00 MiB more.*raise (--vram-budget|vram_budget)"
            ) as raised:
                own(backend).extend([7, 9], [PREFIX, PREFIX])
            runner._forward = forward
            assert raised.value.requested_bytes == 20 * 2**20
            assert "\n" not in str(raised.value)
            assert own(backend).n_committed == len(PROMPT)
            assert np.array_equal(own(backend).extend([7, 9], [PREFIX, PREFIX])[1], expected)
            own(backend).rollback(len(PROMPT))


def test_out_of_memory_lets_go_of_the_activations() -> None:
    """Otherwise the broken pass would keep the memory from the next one."""
    alive: list[torch.Tensor] = []

    class Watched:
        def __init__(self) -> None:
            alive.append(self)

        def __del__(self) -> None:
            dead.append(True)

    dead: list[bool] = []

    def broken_pass() -> None:
        activation = Watched()
        alive.clear()
        raise torch.OutOfMemoryError(f"CUDA out of memory. {type(activation)}")

    with pytest.raises(VramExceeded) as raised, CpuEngine().computing():
        broken_pass()
    assert dead, "the error still refers to the frames of the pass"
    assert raised.value.requested_bytes == 0


def test_other_errors_pass_through() -> None:
    for error in (RuntimeError("size mismatch"), KeyError("x")):
        with pytest.raises(type(error)), CpuEngine().computing():
            raise error


@pytest.mark.parametrize(
    ("said", "n_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has", 512),
        ("CUDA out of memory. Tried to allocate 2.50 KiB. GPU 0 has", 2560),
        ("CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has", 5 * 2**28),
        ("CUDA error: out of memory", 0),
    ],
)
def test_what_torch_says_was_asked_for(said: str, n_bytes: int) -> None:
    assert requested_bytes(said) == n_bytes

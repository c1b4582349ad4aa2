"""Recordings: what is kept, what is not, and what a fake of CUDA graphs finds out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpu_engine import CpuEngine
from graph_tape import GraphTape, no_memory

from backends.contract.backend import BackendError
from backends.cuda.engine import cuda_problem
from backends.cuda.errors import VramExceeded
from backends.cuda.graphs import CudaGraphs, Graphs, Replay


class Clocked(Graphs):
    """Takes as long as it is told."""

    def __init__(self, replay_seconds: float, run_seconds: float) -> None:
        super().__init__()
        self._taken = {"replay": replay_seconds, "run": run_seconds}
        self.n_forgotten = 0

    def forget(self) -> None:
        self.n_forgotten += 1

    def _capture(self, run: Replay) -> Replay:
        run()

        def replay() -> torch.Tensor:
            return torch.zeros(1)

        return replay

    def _wait(self) -> None:
        pass

    def _seconds(self, run: Replay) -> float:
        return self._taken[run.__name__]


@pytest.mark.parametrize(("replay_seconds", "is_kept"), [(1.0, True), (2.0, False), (3.0, False)])
def test_the_faster_way_is_kept(replay_seconds: float, is_kept: bool) -> None:
    n_runs = 0

    def run() -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        return torch.ones(1)

    found = Clocked(replay_seconds, 2.0).record(run)
    assert (found is not run) == is_kept
    assert n_runs == 3  # libraries have set themselves up by the time it is recorded


def choose(x: torch.Tensor) -> torch.Tensor:
    return x[x > 1]


def made_of_numbers(x: torch.Tensor) -> torch.Tensor:
    """As torch.tensor ends on a GPU; on a CPU, and of meta tensors, it is another matter."""
    return torch.ops.aten.lift_fresh.default(torch.empty(3, device="meta"))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda x: x * float(x.sum()), "_local_scalar_dense gives"),
        (lambda x: x if (x > 0).all() else x + 1, "gives what the host has to know"),
        (choose, "gives what the host has to know"),
        (torch.nonzero, "nonzero gives"),
        (lambda x: x.to("meta"), "from one device to another"),
        (made_of_numbers, "made of numbers that the host has"),
    ],
)
def test_a_pass_that_waits_for_the_host_is_run_anew(
    ask: Callable[[torch.Tensor], torch.Tensor], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not even tried: a recording that breaks off leaves the allocator unusable."""
    tape, buffer = GraphTape(), torch.ones(3)
    with torch.inference_mode():
        run = tape.record(lambda: ask(buffer))
        buffer.fill_(2.0)
        assert run().shape == ask(buffer).shape
        tape.record(lambda: buffer + 1)
    assert tape.n_recorded == 0
    assert caplog.text.count("passes are run without a recording: ") == 1
    assert said in caplog.text


def test_a_recording_that_breaks_off_all_the_same_is_one_line(monkeypatch) -> None:
    tape = GraphTape()

    def capture(run: Replay) -> Replay:
        raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(tape, "_capture", capture)
    with pytest.raises(BackendError, match="not permitted when stream.*--draft-device cpu"):
        tape.record(lambda: torch.ones(1))


def test_a_recording_without_memory_is_our_error() -> None:
    """torch says so in the error before the last one."""
    tape = GraphTape()
    engine = CpuEngine()
    with (
        no_memory(tape),
        pytest.raises(VramExceeded, match="needs 20.00 MiB more"),
        engine.computing(),
    ):
        tape.record(lambda: torch.ones(1))
    assert tape.record(lambda: torch.ones(1))().tolist() == [1.0]
    assert tape.n_recorded == 1


def test_the_fake_replays_computations_and_not_code() -> None:
    """What it is for: a pass whose code goes by something else than its inputs is found out."""
    tape, buffer, length = GraphTape(), torch.arange(4.0), [2]
    with torch.inference_mode():
        replay = tape.record(lambda: buffer[: length[0]] * 2)
        length[0] = 3
        buffer += 1
        assert replay().tolist() == [2.0, 4.0]
        buffer += 1
        assert replay().tolist() == [4.0, 6.0]
        tape.forget()
        with pytest.raises(AssertionError, match="memory is gone"):
            replay()


def test_the_fake_replays_what_changes_memory_and_what_makes_several_tensors() -> None:
    tape, given, kept = GraphTape(), torch.tensor([3.0, 1.0, 2.0]), torch.zeros(3)

    def run() -> torch.Tensor:
        values, order = given.sort()
        kept[1:] = values[1:]
        kept.add_(1)
        return order.float() + kept.view(3, 1)[:, 0]

    with torch.inference_mode():
        replay = tape.record(run)
        kept.zero_()
        given.copy_(torch.tensor([1.0, 5.0, 4.0]))
        assert replay().tolist() == [0 + 1, 2 + 5, 1 + 6]
        assert kept.tolist() == [1, 5, 6]


def test_the_fake_finds_memory_that_is_gone() -> None:
    tape, held = GraphTape(), [torch.ones(1000)]
    with torch.inference_mode():
        replay = tape.record(lambda: held[0] * 2)
        replay()
        held[0] = torch.ones(1000)
        with pytest.raises(AssertionError, match="memory of an input is gone"):
            replay()


@pytest.mark.cuda
@pytest.mark.skipif(cuda_problem() is not None, reason=cuda_problem() or "")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cuda_graph_replays_with_new_inputs(dtype: torch.dtype) -> None:
    graphs = CudaGraphs()
    with torch.cuda.stream(torch.cuda.Stream()):
        buffer = torch.zeros(4, device="cuda", dtype=dtype)
        weight = torch.eye(4, device="cuda", dtype=dtype) * 3
        replay = graphs.record(lambda: weight @ buffer)
        for value in (1.0, 2.0):
            buffer.fill_(value)
            assert replay().tolist() == [3 * value] * 4
    graphs.forget()

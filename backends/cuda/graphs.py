"""Passes recorded as graphs of a GPU's work, where that is faster than running them anew."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.contract.backend import BackendError
from backends.contract.library_errors import one_line
from backends.cuda.errors import out_of_memory_in

logger = logging.getLogger(__name__)

_TIMED_RUNS = 3
_READ_NUMBERS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")
_COPY = ("_to_copy", "copy_")
_MADE_OF_NUMBERS = "lift_fresh"
"""What torch.tensor ends with; the copy to the device that it made before is not dispatched."""

Replay = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Makes a pass that can be repeated; inputs and output are the same tensors every time."""

    def record(self, run: Replay) -> Replay:
        """`run` may be called any number of times before; what it enqueues is what is replayed."""

    def forget(self) -> None:
        """Let go of the memory of all recordings, of which none will be replayed."""


class Unrecorded:
    """Runs the pass anew every time."""

    def record(self, run: Replay) -> Replay:
        return run

    def forget(self) -> None:
        pass


class NeedsHost(Exception):
    """A pass waits for the host, or for what the host has, in the midst of its computations."""


class WithoutHost(TorchDispatchMode):
    """Raises NeedsHost where a recording would break off.

    Seen beforehand, because one that does leaves torch's allocator unusable (pytorch#180395, mended
    in torch 2.12).
    """

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode operations come whole that are made of others
            result = operation.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = operation._schema.name.removeprefix("aten::")
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        chooses_rows = name.startswith("index") and any(one.dtype == torch.bool for one in given)
        if name in _READ_NUMBERS or chooses_rows:
            raise NeedsHost(f"{name} gives what the host has to know")
        result = operation(*args, **kwargs)
        if name in _COPY and len({one.device for one in (*given, result)}) > 1:
            raise NeedsHost(f"{name} brings a tensor from one device to another")
        if name == _MADE_OF_NUMBERS and result.device.type != "cpu":
            raise NeedsHost("a tensor on the device is made of numbers that the host has")
        return result


class Graphs(ABC):
    """Records a pass, times it both ways, and keeps the faster one.

    A pass that cannot be recorded is run anew every time, and the log says why; so are all later
    ones, because it is the model's code that does not allow it.
    """

    def __init__(self) -> None:
        self._can_record = True

    def record(self, run: Replay) -> Replay:
        """Raises BackendError where recording fails for no reason that could be foreseen."""
        if not self._can_record:
            return run
        try:
            with WithoutHost():
                run()
        except NeedsHost as error:
            logger.warning("passes are run without a recording: %s", error)
            self._can_record = False
            return run
        run()  # a second time: libraries set themselves up on first use
        try:
            replay = self._capture(run)
        except RuntimeError as error:
            if out_of_memory_in(error) is not None:
                raise
            raise BackendError(
                f"a pass cannot be recorded: {one_line(error)}: draft with --draft-device cpu"
            ) from error
        return replay if self._seconds(replay) < self._seconds(run) else run

    @abstractmethod
    def forget(self) -> None:
        """See Recorder.forget."""

    @abstractmethod
    def _capture(self, run: Replay) -> Replay:
        """Raises RuntimeError where that fails."""

    @abstractmethod
    def _wait(self) -> None:
        """For all that is enqueued."""

    def _seconds(self, run: Replay) -> float:
        """The shortest of a few runs; a pass over the same inputs changes nothing."""
        seconds = []
        for _ in range(_TIMED_RUNS):
            self._wait()
            began = time.perf_counter()
            run()
            self._wait()
            seconds.append(time.perf_counter() - began)
        return min(seconds)


class CudaGraphs(Graphs):
    """CUDA graphs, which share one pool of memory.

    All is done in the current stream, which must not be the default one: the memory of the runs
    before serves again, and so does the workspace that cuBLAS has for each stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pool: tuple[int, int] | None = None

    def forget(self) -> None:
        self._pool = None

    def _capture(self, run: Replay) -> Replay:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Another thread's pass may call CUDA meanwhile, which the default mode would not allow.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, stream=stream, capture_error_mode=mode):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def _wait(self) -> None:
        torch.cuda.current_stream().synchronize()

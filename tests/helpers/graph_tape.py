"""A fake of CUDA graphs: records what torch computes, and replays that, not the code that asked.

As a graph does it, a recording keeps addresses and shapes and nothing else. What Python worked out
while it was recorded (a length, a slice, a branch) is the same in every replay, so a pass that
depends on such a thing gives wrong results here as it would there. Memory that was there before the
recording and is gone by the replay, which a graph would go on using, is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from backends.cuda.graphs import CudaGraphs, Graphs, Replay


@dataclass
class _Call:
    """One operation, with the tensors that it was given and those that it made."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: dict[int, torch.Tensor]
    """By its place among the results: fresh memory that it filled, neither views nor what it was
    given to change."""

    def again(self) -> None:
        found = tree_leaves(self.operation(*self.args, **self.kwargs))
        for place, kept in self.made.items():
            kept.copy_(found[place])


class _Recording(TorchDispatchMode):
    """Notes every operation while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.own: set[int] = set()
        """Memory of the recording, by address: in the pool of a graph."""
        self._outside: dict[int, StorageWeakRef] = {}
        self._n_holders: dict[int, int] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_place(one) for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
        result = operation(*args, **kwargs)
        results = enumerate(tree_leaves(result))
        made = {i: one for i, one in results if _is_tensor(one) and _place(one) not in given}
        self.own.update(_place(one) for one in made.values())
        if made or operation._schema.is_mutable:  # a view is where it is
            held_args, held_kwargs = tree_map(self._held, (args, kwargs))
            self.calls.append(_Call(operation, held_args, held_kwargs, made))
        return result

    def _held(self, value: Any) -> Any:
        """Of memory from outside another tensor: so that the loss of the first one shows."""
        if not _is_tensor(value) or _place(value) in self.own:
            return value
        self._outside[_place(value)] = StorageWeakRef(value.untyped_storage())
        return torch.ops.aten.alias.default(value)

    def end(self) -> None:
        """The calls hold on to all memory: that somebody else does too shows in the numbers."""
        self._n_holders = {at: _holders(one) for at, one in self._outside.items()}

    def is_alive(self) -> bool:
        """Whether what was there before still is."""
        return all(_holders(one) >= self._n_holders[at] for at, one in self._outside.items())


class GraphTape(Graphs):
    """A recorder whose recordings are always kept."""

    def __init__(self) -> None:
        super().__init__()
        self.n_recorded = self.n_replayed = self.generation = 0

    def forget(self) -> None:
        self.generation += 1

    def _capture(self, run: Replay) -> Replay:
        with _Recording() as recording:
            output = run()
        recording.end()
        self.n_recorded += 1
        generation = self.generation

        def replay() -> torch.Tensor:
            assert generation == self.generation, "its memory is gone"
            assert recording.is_alive(), "memory of an input is gone"
            self.n_replayed += 1
            for call in recording.calls:
                call.again()
            return output

        return replay

    def _wait(self) -> None:
        """Nothing is enqueued on the CPU."""

    def _seconds(self, run: Replay) -> float:
        return _as_if_faster(run)


class AlwaysGraphs(CudaGraphs):
    """Graphs of a real GPU, kept whether they are faster or not."""

    def __init__(self) -> None:
        super().__init__()
        self.n_recorded = 0

    def record(self, run: Replay) -> Replay:
        replay = super().record(run)
        assert replay is not run
        self.n_recorded += 1
        return replay

    def _seconds(self, run: Replay) -> float:
        return _as_if_faster(run)


def _as_if_faster(run: Replay) -> float:
    return 0.0 if run.__name__ == "replay" else 1.0


@contextmanager
def no_memory(tape: GraphTape) -> Iterator[None]:
    """Recordings run out of memory meanwhile, as torch says it: in the error before the last."""

    def capture(run: Replay) -> Replay:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    whole = tape._capture
    tape._capture = capture  # type: ignore[method-assign]
    try:
        yield
    finally:
        tape._capture = whole  # type: ignore[method-assign]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta"


def _holders(memory: StorageWeakRef) -> int:
    return int(torch._C._storage_Use_Count(memory.cdata))


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())

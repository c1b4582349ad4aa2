"""Shares of the memory that the models of one server have together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specdec.run_options import RunOptions
from specdec.serve.process.child import Start


@dataclass(frozen=True)
class Share:
    """Bytes of host memory and of a GPU's memory."""

    host_bytes: int = 0
    vram_bytes: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(self.host_bytes + other.host_bytes, self.vram_bytes + other.vram_bytes)

    def fits(self, capacity: Share) -> bool:
        return self.host_bytes <= capacity.host_bytes and self.vram_bytes <= capacity.vram_bytes


@dataclass(frozen=True)
class ModelOptions:
    """One model of a server.

    names: names that clients know it by, the first of which answers have.
    load: options to load it with; its budgets are the share.
    share: memory of its engine while it is loaded; None is the whole budget of a server that has
    one model.
    keep_alive: seconds that it stays loaded without a request.
    on_startup: whether it is loaded when the server starts.
    ctx_size: context length that is planned; 0 before a plan.
    """

    names: tuple[str, ...]
    load: RunOptions
    share: Share | None = None
    keep_alive: float = float("inf")
    on_startup: bool = True
    ctx_size: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether it stays loaded as long as the server runs, whatever a request says."""
        return self.share is None and self.keep_alive == float("inf")

    @property
    def name(self) -> str:
        return self.names[0]

    def with_budget(self, memory_budget: str | int, n_bytes: int) -> ModelOptions:
        """Return the options with another memory budget, of so many bytes."""
        load = replace(self.load, memory_budget=memory_budget)
        share = None if self.share is None else replace(self.share, host_bytes=n_bytes)
        return replace(self, load=load, share=share)


Starter = Callable[[ModelOptions], Start]
"""Returns the function that starts a model's engine."""

"""`specdec plan --machines N`: what several machines like the planned one do to a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.planning.memory.pinnable import TEXT_TOKENS
from specdec.planning.run_plan import RunPlan


@dataclass(frozen=True)
class Machines:
    """Each holds the model for itself and answers lines of its own: nothing is divided but them."""

    n: int
    plan: RunPlan
    """Of one of them."""

    @property
    def tokens_per_second(self) -> float:
        """Of all together, one text at a time on each."""
        return self.n * self.plan.predicted_tokens_per_second

    @property
    def lines_per_hour(self) -> float:
        return self.tokens_per_second * 3600 / TEXT_TOKENS

    @property
    def storage_bytes_per_second(self) -> float:
        """Read by all together: of one storage, where they share it."""
        n_bytes = self.plan.decoding.target.placement.streamed_bytes
        return self.n * n_bytes / self.plan.pass_seconds(1) if n_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "tokens_per_second": self.tokens_per_second,
            "lines_per_hour": self.lines_per_hour,
            "storage_bytes_per_second": self.storage_bytes_per_second,
        }

    def lines(self) -> list[str]:
        reported = [
            f"{self.n} machines like this one, {self.n} times its lines: "
            f"{self.tokens_per_second:.2f} tokens/s together, {self.lines_per_hour:.0f} lines of "
            f"{TEXT_TOKENS} tokens an hour; a single text is no faster"
        ]
        if self.storage_bytes_per_second:
            reported.append(
                "that is with a disk in each: a network disk that all of them read would have to "
                f"give {self.storage_bytes_per_second / 1e9:.2f} GB/s"
            )
        return reported

"""`specdec plan --machines N`: throughput of several machines like the planned one on a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.run_plan import RunPlan


@dataclass(frozen=True)
class Machines:
    """Several machines, each with the whole model; only the lines of the batch are divided."""

    n: int
    plan: RunPlan
    """The plan of one machine."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all machines together, one sequence at a time on each."""
        return self.n * self.plan.predicted_tokens_per_second

    @property
    def lines_per_hour(self) -> float:
        return self.tokens_per_second * 3600 / SEQUENCE_TOKENS

    @property
    def storage_bytes_per_second(self) -> float:
        """Bytes read per second by all machines together, as from one storage that they share."""
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
        lines = [
            f"{self.n} machines like this one, {self.n} times its lines: "
            f"{self.tokens_per_second:.2f} tokens/s together, {self.lines_per_hour:.0f} lines of "
            f"{SEQUENCE_TOKENS} tokens an hour; a single sequence is no faster"
        ]
        if self.storage_bytes_per_second:
            lines.append(
                "that is with a disk in each: a network disk that all of them read would have to "
                f"give {self.storage_bytes_per_second / 1e9:.2f} GB/s"
            )
        return lines

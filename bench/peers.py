"""Other programs on the same checkpoint, prompts and memory limit."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.child import KILLED, ChildFailed, check_child, run_child
from bench.workloads import Prompt
from offload.errors import SpecdecError
from offload.units import MIB, format_bytes

# What an interpreter with torch and transformers takes before any weight is loaded.
_LEAST_OVERHEAD_BYTES = 512 * MIB
_STEPS = 8


class PeerError(SpecdecError):
    """The peer cannot run here."""


@dataclass
class AcceleratePeer:
    """transformers + accelerate with disk offload; finds out how much memory it can have.

    The first call tries amounts of CPU memory from the largest down and stays with the first that
    the kernel does not kill. Later calls use that one.
    """

    model: Path
    budget_bytes: int
    n_tokens: int
    enforced: bool
    ignore_eos: bool = False
    cpu_memory_bytes: int | None = None
    trials: list[dict[str, Any]] = field(default_factory=list)

    def run(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Decode the prompts in a fresh process; returns what `bench.peer_accelerate` found."""
        known = self.cpu_memory_bytes
        for amount in [known] if known is not None else list(candidates(self.budget_bytes)):
            result = self._try(prompts, amount)
            if result is not None:
                self.cpu_memory_bytes = amount
                return result
        raise PeerError(
            f"accelerate was killed at every setting within {format_bytes(self.budget_bytes)}; "
            "leave --peer out or give a larger --memory-budget"
        )

    def _try(self, prompts: Sequence[Prompt], cpu_memory_bytes: int) -> dict[str, Any] | None:
        """None when the kernel killed it."""
        print(
            f"peer accelerate: {len(prompts)} prompts x {self.n_tokens} tokens, "
            f"{format_bytes(cpu_memory_bytes)} for weights in memory",
            file=sys.stderr,
        )
        with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
            output = Path(folder) / "result.json"
            prompt_file = Path(folder) / "prompts.jsonl"
            lines = [json.dumps({"id": p.name, "prompt": p.text}) + "\n" for p in prompts]
            prompt_file.write_text("".join(lines), encoding="utf-8")
            argv = ["--model", str(self.model), "--prompts", str(prompt_file)]
            argv += ["--cpu-memory", str(cpu_memory_bytes), "--n-tokens", str(self.n_tokens)]
            argv += ["--output", str(output), *(["--ignore-eos"] if self.ignore_eos else [])]
            limit = self.budget_bytes if self.enforced else None
            code = run_child("bench.peer_accelerate", argv, limit)
            survived = code == 0 and output.exists()
            self.trials.append({"cpu_memory_bytes": cpu_memory_bytes, "exit_code": code})
            if code == KILLED:
                print("peer accelerate: killed at the limit, trying less", file=sys.stderr)
                return None
            check_child(code, "the peer")
            if not survived:
                raise ChildFailed("the peer wrote no result")
            result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
            return result


def candidates(budget_bytes: int) -> Iterator[int]:
    """Amounts of memory for weights, from the largest that could work down to almost none."""
    largest = max(budget_bytes - _LEAST_OVERHEAD_BYTES, 64 * MIB)
    step = max(largest // _STEPS, 64 * MIB)
    for index in range(_STEPS):
        amount = largest - index * step
        if amount >= 64 * MIB:
            yield amount


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Total decode tokens / total decode seconds, as for our own figures."""
    records = [record for run in runs for record in run["prompts"]]
    seconds = sum(record["decode_seconds"] for record in records)
    n_tokens = sum(record["decode_tokens"] for record in records)
    first = [record["time_to_first_token"] for record in records]
    return {
        "tokens_per_second": n_tokens / seconds if seconds else 0.0,
        "time_per_output_token": seconds / n_tokens if n_tokens else 0.0,
        "time_to_first_token": sum(first) / len(first) if first else 0.0,
        "load_seconds": max((run["load_seconds"] for run in runs), default=0.0),
        "peak_memory_bytes": max((run["peak_rss_bytes"] for run in runs), default=0),
        "prompts": records,
    }

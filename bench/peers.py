"""Other programs on the same checkpoint, prompts and memory limit."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.child import KILLED, check_child, forget_cached, run_child
from bench.workloads import Prompt
from offload.errors import SpecdecError
from offload.units import MIB, format_bytes
from specdec.stats import ratio

# What an interpreter with torch and transformers takes before any weight is loaded.
_LEAST_OVERHEAD_BYTES = 512 * MIB
_STEPS = 4
_TRIAL_TOKENS = 4


class PeerError(SpecdecError):
    """The peer cannot run here."""


@dataclass
class AcceleratePeer:
    """transformers + accelerate with disk offload, given the amount of memory that suits it best.

    The first call tries several amounts of CPU memory for weights and stays with the fastest that
    the kernel does not kill. The largest is not always the fastest: transformers maps the weights
    that it keeps "in memory" from the file, so they share the page cache with those on disk.
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
        if self.cpu_memory_bytes is None:
            self.cpu_memory_bytes = self._find_best_amount(prompts[0])
        result = self._decode(prompts, self.cpu_memory_bytes, self.n_tokens)
        if result is None:
            raise self._killed()
        return result

    def _find_best_amount(self, prompt: Prompt) -> int:
        for amount in candidates(self.budget_bytes):
            result = self._decode([prompt], amount, _TRIAL_TOKENS)
            speed = None if result is None else summarise([result])["tokens_per_second"]
            self.trials.append({"cpu_memory_bytes": amount, "tokens_per_second": speed})
        survivors = [trial for trial in self.trials if trial["tokens_per_second"] is not None]
        if not survivors:
            raise self._killed()
        best = max(survivors, key=lambda trial: float(trial["tokens_per_second"]))
        return int(best["cpu_memory_bytes"])

    def _killed(self) -> PeerError:
        return PeerError(
            f"accelerate was killed at the limit of {format_bytes(self.budget_bytes)}; "
            "leave --peer out or give a larger --memory-budget"
        )

    def _decode(
        self, prompts: Sequence[Prompt], cpu_memory_bytes: int, n_tokens: int
    ) -> dict[str, Any] | None:
        """None when the kernel killed it."""
        print(
            f"peer accelerate: {len(prompts)} prompts x {n_tokens} tokens, "
            f"{format_bytes(cpu_memory_bytes)} for weights in memory",
            file=sys.stderr,
        )
        with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
            output = Path(folder) / "result.json"
            prompt_file = Path(folder) / "prompts.jsonl"
            lines = [json.dumps({"id": p.name, "prompt": p.text}) + "\n" for p in prompts]
            prompt_file.write_text("".join(lines), encoding="utf-8")
            argv = ["--model", str(self.model), "--prompts", str(prompt_file)]
            argv += ["--cpu-memory", str(cpu_memory_bytes), "--n-tokens", str(n_tokens)]
            argv += ["--output", str(output), *(["--ignore-eos"] if self.ignore_eos else [])]
            limit = self.budget_bytes if self.enforced else None
            forget_cached(self.model)
            code = run_child("bench.peer_accelerate", argv, limit)
            if code == KILLED:
                return None
            check_child(code, "the peer")
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
        "tokens_per_second": ratio(n_tokens, seconds),
        "time_per_output_token": ratio(seconds, n_tokens),
        "time_to_first_token": ratio(sum(first), len(first)),
        "load_seconds": max((run["load_seconds"] for run in runs), default=0.0),
        "peak_memory_bytes": max((run["peak_rss_bytes"] for run in runs), default=0),
        "prompts": records,
    }

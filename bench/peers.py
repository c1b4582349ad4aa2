"""Other programs on the same checkpoint, prompts and memory limit."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.child import KILLED, check_child, forget_cached, run_child
from bench.workloads import Prompt
from offload.errors import SpecdecError
from offload.units import MIB, format_bytes
from specdec.stats import ratio

# What an interpreter with torch and transformers takes before any weight is loaded.
_LEAST_OVERHEAD_BYTES = 512 * MIB
_STEPS = 4
_TRIAL_TOKENS = 4


PEERS = ("accelerate", "llama.cpp", "llama.cpp-draft")


class PeerError(SpecdecError):
    """The peer cannot run here."""


@dataclass(frozen=True)
class PeerSettings:
    """What every peer is given."""

    model: Path
    budget_bytes: int
    n_tokens: int
    enforced: bool
    ignore_eos: bool = False
    draft: Path | None = None
    cpu_memory_bytes: int | None = None
    """For accelerate: memory for weights, instead of the best of several amounts."""
    n_threads: int | None = None
    n_ctx: int = 2048


class Peer(ABC):
    """Another program; every call of `run` is a fresh process inside the same memory limit."""

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings
        self.trials: list[dict[str, Any]] = []
        """Settings that were tried before the best was chosen."""

    @abstractmethod
    def run(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Decode the prompts; the keys are those that `summarise` reads."""

    def _killed(self, name: str) -> PeerError:
        return PeerError(
            f"{name} was killed at the limit of {format_bytes(self.settings.budget_bytes)}; "
            "leave --peer out or give a larger --memory-budget"
        )

    def _run_process(
        self, module: str, prompts: Sequence[Prompt], n_tokens: int, more: Sequence[str]
    ) -> dict[str, Any] | None:
        """What the module found; None when the kernel killed it."""
        settings = self.settings
        with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
            output = Path(folder) / "result.json"
            prompt_file = Path(folder) / "prompts.jsonl"
            lines = [json.dumps({"id": p.name, "prompt": p.text}) + "\n" for p in prompts]
            prompt_file.write_text("".join(lines), encoding="utf-8")
            argv = ["--model", str(settings.model), "--prompts", str(prompt_file)]
            argv += ["--n-tokens", str(n_tokens), "--output", str(output), *more]
            argv += ["--ignore-eos"] if settings.ignore_eos else []
            forget_cached(settings.model)
            code = run_child(module, argv, settings.budget_bytes if settings.enforced else None)
            if code == KILLED:
                return None
            check_child(code, "the peer")
            result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
            return result


class LlamaPeer(Peer):
    """llama.cpp with its weights mapped from the file, plain or with a draft model."""

    def run(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        settings = self.settings
        n_threads = settings.n_threads or psutil.cpu_count(logical=False) or 1
        more = ["--threads", str(n_threads), "--ctx-size", str(settings.n_ctx)]
        name = "llama.cpp"
        if settings.draft is not None:
            more += ["--draft", str(settings.draft)]
            name = "llama.cpp with a draft"
        say(f"peer {name}: {len(prompts)} prompts x {settings.n_tokens} tokens")
        result = self._run_process("bench.peer_llama", prompts, settings.n_tokens, more)
        if result is None:
            raise self._killed(name)
        return result


class AcceleratePeer(Peer):
    """transformers + accelerate with disk offload, given the amount of memory that suits it best.

    The first call tries several amounts of CPU memory for weights and stays with the fastest that
    the kernel does not kill. The largest is not always the fastest: transformers maps the weights
    that it keeps "in memory" from the file, so they share the page cache with those on disk.
    """

    def __init__(self, settings: PeerSettings) -> None:
        super().__init__(settings)
        self._cpu_memory_bytes = settings.cpu_memory_bytes

    def run(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        if self._cpu_memory_bytes is None:
            self._cpu_memory_bytes = self._find_best_amount(prompts[0])
        result = self._decode(prompts, self._cpu_memory_bytes, self.settings.n_tokens)
        if result is None:
            raise self._killed("accelerate")
        return result

    def _find_best_amount(self, prompt: Prompt) -> int:
        for amount in candidates(self.settings.budget_bytes):
            result = self._decode([prompt], amount, _TRIAL_TOKENS)
            speed = None if result is None else summarise([result])["tokens_per_second"]
            self.trials.append({"cpu_memory_bytes": amount, "tokens_per_second": speed})
        survivors = [trial for trial in self.trials if trial["tokens_per_second"] is not None]
        if not survivors:
            raise self._killed("accelerate")
        best = max(survivors, key=lambda trial: float(trial["tokens_per_second"]))
        return int(best["cpu_memory_bytes"])

    def _decode(
        self, prompts: Sequence[Prompt], cpu_memory_bytes: int, n_tokens: int
    ) -> dict[str, Any] | None:
        say(
            f"peer accelerate: {len(prompts)} prompts x {n_tokens} tokens, "
            f"{format_bytes(cpu_memory_bytes)} for weights in memory"
        )
        more = ["--cpu-memory", str(cpu_memory_bytes)]
        return self._run_process("bench.peer_accelerate", prompts, n_tokens, more)


def make_peer(name: str, settings: PeerSettings) -> Peer:
    """The peer of that name from PEERS."""
    return AcceleratePeer(settings) if name == "accelerate" else LlamaPeer(settings)


def why_not(name: str, model: Path, draft: Path | None) -> str | None:
    """Why a peer cannot run these models, or None."""
    if name == "accelerate":
        if model.is_file():
            return "accelerate runs Hugging Face checkpoints, and the model is a GGUF file"
        if importlib.util.find_spec("accelerate") is None:
            return "accelerate is not installed: pip install 'specdec[bench]'"
        return None
    if not model.is_file():
        return "llama.cpp runs GGUF files, and the model is a checkpoint directory"
    if name == "llama.cpp-draft" and (draft is None or not draft.is_file()):
        return "llama.cpp-draft needs a GGUF draft model: give -md"
    return None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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

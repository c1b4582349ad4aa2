"""Registry of the programs that can be compared, of their weights, and reasons why one cannot run.

Every program is a module `bench.peers.*` that does a `bench.peers.program.Task` in a process of its
own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process.interpreters import Interpreter, has_module
from offload.distribution import install_command
from offload.units import MIB
from specdec.models.names import resolve_draft, resolve_model

HF, GGUF = "hf", "gguf"
MEMORY, DRAFTING = "memory", "drafting"
_FORMAT_NAMES = {HF: "a Hugging Face checkpoint", GGUF: "a GGUF file"}

# Memory of an interpreter with torch and transformers before any weight is loaded.
_MIN_OVERHEAD_BYTES = 512 * MIB
MIN_AMOUNT_BYTES = 64 * MIB
_STEPS = 4

# llama.cpp's defaults (common/common.h, as in llama-cpp-python 0.3.36), the length in the README of
# its speculative-simple, and the defaults of 2025 with and without their threshold, shorter by one:
# a pass of 16 rows takes less than one of 17, as kernels compute 16 at a time. A pass that waits
# for storage takes more tokens nearly for free; a draft that streams itself does not.
DRAFT_CHAINS = (
    {"max_draft_tokens": 3, "min_draft_probability": 0.0},
    {"max_draft_tokens": 7, "min_draft_probability": 0.0},
    {"max_draft_tokens": 15, "min_draft_probability": 0.0},
    {"max_draft_tokens": 15, "min_draft_probability": 0.75},
)


@dataclass(frozen=True)
class Peer:
    """Program in one configuration."""

    name: str
    module: str
    formats: tuple[str, ...]
    about: str
    """Description of its configuration, for the table's legend."""
    uses_draft: bool = False
    package: str = ""
    """Package that it needs."""
    install: str = ""
    tunes: str = ""
    """Settings that are tuned for speed on one prompt: MEMORY or DRAFTING."""
    takes_mtp_head: bool = False
    """Whether it can use a draft without files: mtp, the head in the target."""
    speculates: bool = False
    """Whether it has a mean acceptance length to report."""
    rewrites: bool = False
    """Whether it converts the weights first, in a process of its own that is not measured."""


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "accelerate",
            "bench.peers.accelerate",
            (HF,),
            "transformers + accelerate, disk offload, the fastest max_memory",
            package="accelerate",
            install=install_command("bench"),
            tunes=MEMORY,
        ),
        Peer(
            "accelerate-assisted",
            "bench.peers.accelerate",
            (HF,),
            "the same with assistant_model",
            uses_draft=True,
            package="accelerate",
            install=install_command("bench"),
            tunes=MEMORY,
            speculates=True,
        ),
        Peer(
            "llama.cpp",
            "bench.peers.llama",
            (GGUF,),
            "llama.cpp, weights mapped from the file, not repacked",
            package="llama_cpp",
            install=install_command("gguf"),
        ),
        Peer(
            "llama.cpp-draft",
            "bench.peers.llama",
            (GGUF,),
            "the same with a chain of draft tokens, as in speculative-simple, the fastest length",
            uses_draft=True,
            package="llama_cpp",
            install=install_command("gguf"),
            tunes=DRAFTING,
            speculates=True,
        ),
        Peer(
            "llama.cpp-server",
            "bench.peers.llama_server",
            (GGUF,),
            "a recent llama.cpp's own server, weights mapped from the file, not repacked",
            package="xllamacpp",
            install="pip install xllamacpp",
        ),
        Peer(
            "llama.cpp-mtp",
            "bench.peers.llama_server",
            (GGUF,),
            "the same with the target's MTP head, the fastest chain",
            package="xllamacpp",
            install="pip install xllamacpp",
            tunes=DRAFTING,
            speculates=True,
        ),
        Peer(
            "airllm",
            "bench.peers.airllm",
            (HF,),
            "AirLLM on the CPU, no compression",
            package="airllm",
            install="pip install airllm",
            rewrites=True,
        ),
        Peer("specdec-plain", "bench.peers.specdec", (HF, GGUF), "specdec without a draft"),
        Peer(
            "specdec",
            "bench.peers.specdec",
            (HF, GGUF),
            "specdec with the draft",
            uses_draft=True,
            takes_mtp_head=True,
            speculates=True,
        ),
    )
}


@dataclass(frozen=True)
class Weights:
    """Target in one format, and its draft."""

    format: str
    model: Path
    draft: Path | str | None = None
    """Path, or as str the name of a draft without files: mtp."""

    @classmethod
    def of(cls, model: Path, draft: Path | str | None = None) -> Weights:
        return cls(GGUF if model.is_file() else HF, model, draft)

    @classmethod
    def named(cls, model: str, draft: str | None = None) -> Weights:
        """Return the weights of typed names. Raises specdec.models.names.ModelNotFound."""
        return cls.of(resolve_model(model), resolve_draft(draft) or draft)

    @property
    def draft_path(self) -> Path | None:
        """Path of the draft's files, if it has any."""
        return self.draft if isinstance(self.draft, Path) else None


def why_not(
    peer: Peer, weights: Weights | None, interpreter: Interpreter | None = None
) -> str | None:
    """Return why a peer cannot run; None if it can. `weights` is None if its format is missing.

    interpreter: the one that it runs on, if that is not ours.
    """
    if peer.package and not has_module(peer.package, interpreter):
        where = "" if interpreter is None else f" for {interpreter.path}"
        return f"not installed{where}: {peer.install}"
    if weights is None or weights.format not in peer.formats:
        needed = " or ".join(_FORMAT_NAMES[item] for item in peer.formats)
        return f"it runs {needed}, which was not given"
    if peer.rewrites and not os.access(weights.model.parent, os.W_OK):
        return f"it writes the weights anew, and {weights.model.parent} cannot be written to"
    if peer.uses_draft and weights.draft is None:
        return "it needs a draft model: give -md"
    draft = weights.draft_path
    if peer.uses_draft and draft is None and not peer.takes_mtp_head:
        return f"its draft must be a model of its own, which {weights.draft} is not"
    if peer.uses_draft and draft is not None and Weights.of(draft).format not in peer.formats:
        return f"its draft must be {_FORMAT_NAMES[weights.format]}"
    return None


def settings_to_try(peer: Peer, budget_bytes: int) -> list[dict[str, Any]]:
    """Return the `Task.options` to tune over; empty if nothing is tuned."""
    if peer.tunes == MEMORY:
        return [{"cpu_memory_bytes": amount} for amount in memory_amounts(budget_bytes)]
    return [dict(chain) for chain in DRAFT_CHAINS] if peer.tunes == DRAFTING else []


def memory_amounts(budget_bytes: int) -> Iterator[int]:
    """Yield amounts of memory for weights, from the largest that could work down to almost none.

    The largest is not always the fastest: transformers maps the weights that it keeps "in memory"
    from the file, so they share the page cache with those on disk.
    """
    largest = max(budget_bytes - _MIN_OVERHEAD_BYTES, MIN_AMOUNT_BYTES)
    step = max(largest // _STEPS, MIN_AMOUNT_BYTES)
    for index in range(_STEPS):
        amount = largest - index * step
        if amount >= MIN_AMOUNT_BYTES:
            yield amount

"""RunOptions: the keywords of `specdec.load`, validated together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from backends.contract.source import CACHE_TYPES, LOAD_MODES, BackendOptions
from offload.errors import set_keywords
from offload.storage.reading import DEFAULT_N_READERS
from specdec.checks import ConfigError, FieldName, check_type, refuse_loaded
from specdec.config import SPEC_TYPES, SpecConfig
from specdec.option import (
    BEAMS,
    MEMORY,
    MODELS,
    SPECULATION,
    check_options,
    keywords_by_option,
    option,
    required,
    taken_from,
)
from specdec.sampling.context_window import MIN_SHIFTED_CONTEXT
from specdec.sampling.params import MAX_BEAMS, SamplingParams

CPU, CUDA, AUTO = "cpu", "cuda", "auto"
ON, OFF = "on", "off"
DEVICES = (CPU, CUDA, AUTO)
MAX_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""Upper limit of compute threads: more are never faster, and thousands exhaust the machine."""
MAX_IO_THREADS = 64
MAX_PREFETCH_DEPTH = 64
DEFAULT_BEAM_SPAN = 64
DEFAULT_CTX_SIZE = 2048
DEFAULT_PARALLEL = 16
"""Sequences take rows of logits and activations always, but KV only while they run."""
MAX_PARALLEL = 256
_SHOWN_CACHE_TYPE = "the dtype of a checkpoint; of a GGUF f16, or bf16 where exactness needs it"


@dataclass(frozen=True)
class RunOptions:
    """Models and resources of a run, as requested.

    The first type of a union is the one that the command line takes.
    """

    model: str | Path = required(
        "Target model: a directory, a .gguf file, a hub id (user/repo), ollama:NAME, smollm2 or "
        "pair:target.",
        MODELS,
        short="-m",
        shown_default=False,
    )
    draft_model: str | Path | None = option(
        None,
        "Small model with the target's vocabulary, or a draft head made for the target (MTP, "
        "EAGLE-3, DFlash, Gemma 4's assistant), named like the target; pair:draft; mtp: the "
        "target's own MTP head; auto: the one expected to be fastest among that head, the heads "
        "and models on this machine, and n-grams.",
        MODELS,
        short="-md",
        shown_default=False,
    )
    chat_template: str | Path | None = option(
        None,
        "How a conversation becomes a prompt: a jinja file, plain, or chatml.",
        MODELS,
        metavar="FILE|NAME",
        shown_default="the model's own; without one: plain",
    )
    parse_special: bool = option(
        False,
        "Parse control tokens that are written out in messages; whoever writes a message can then "
        "forge turns.",
        MODELS,
        shown_default="off",
    )
    exact: str = option(
        AUTO,
        "Make the output identical to plain decoding's, whatever the draft and the budget: auto "
        "does so where this machine can, on refuses to run where it cannot.",
        MODELS,
        choices=(AUTO, ON, OFF),
    )
    memory_budget: str | int = option(
        AUTO,
        "Memory of the whole process, e.g. 3.5GiB or 6GB; auto takes the cgroup's limit, "
        "or what other processes leave free, if that is less.",
        MEMORY,
        size="2GiB, or auto",
    )
    device: str = option(
        CPU,
        "Where the target is computed; auto takes a GPU if there is one.",
        MEMORY,
        choices=DEVICES,
    )
    vram_budget: str | int = option(
        AUTO,
        "GPU memory of the whole process, e.g. 8GiB; auto takes what is free.",
        MEMORY,
        size="8GiB, or auto",
    )
    ctx_size: int | None = option(
        None,
        "Longest sequence in tokens, prompt included; 0: the model's own context.",
        MEMORY,
        short="-c",
        at_least=0,
        shown_default="2048, or less where the model has less",
    )
    context_shift: bool = option(
        False,
        "Let a text outgrow --ctx-size: once that is full, the target sees its first four tokens "
        "and a window of the last ones, so the output is no longer that of the whole text.",
        MEMORY,
        shown_default="off",
    )
    parallel: int | None = option(
        None,
        "Maximum number of sequences computed together.",
        MEMORY,
        short="-np",
        at_least=1,
        at_most=MAX_PARALLEL,
        shown_default=f"{DEFAULT_PARALLEL}, or fewer with large recurrent states",
    )
    kv_tokens: int | None = option(
        None,
        "Capacity of the KV caches, in tokens of all sequences together; auto takes what "
        "pays off, because unused KV memory holds layers.",
        MEMORY,
        metavar="auto|N",
        at_least=1,
        shown_default="auto",
    )
    threads: int | None = option(
        None, "Compute threads.", MEMORY, at_least=1, at_most=MAX_THREADS, shown_default="all cores"
    )
    prefetch_depth: int | None = option(
        None,
        "Layers in the read-ahead ring.",
        MEMORY,
        at_least=1,
        at_most=MAX_PREFETCH_DEPTH,
        shown_default="planned",
    )
    io_threads: int | None = option(
        None,
        "Threads that read from storage.",
        MEMORY,
        at_least=1,
        at_most=MAX_IO_THREADS,
        shown_default=str(DEFAULT_N_READERS),
    )
    load_mode: str = option(
        "auto",
        "auto streams what does not fit; mmap (GGUF only) leaves it to the page cache.",
        MEMORY,
        choices=LOAD_MODES,
    )
    cache_type_k: str | None = option(
        None,
        "Number format of the keys in the target's KV cache; fp8 for checkpoints, q4_0 for GGUF.",
        MEMORY,
        short="-ctk",
        choices=CACHE_TYPES,
        shown_default=_SHOWN_CACHE_TYPE,
    )
    cache_type_v: str | None = option(
        None,
        "Number format of the values in the target's KV cache; fp8 for checkpoints, q4_0 for GGUF.",
        MEMORY,
        short="-ctv",
        choices=CACHE_TYPES,
        shown_default=_SHOWN_CACHE_TYPE,
    )
    prompt_cache_dir: Path | str | None = option(
        None,
        "Folder to keep the KV of prompts and answers in; later prompts load it from there where "
        "that is quicker than computing it.",
        MEMORY,
        metavar="DIR",
        shown_default="none",
    )
    prompt_cache_size: str | int = option(
        "8GiB", "Maximum size of that folder.", MEMORY, size="8GiB"
    )
    spec_type: str | Sequence[str] | None = option(
        None,
        "Sources of draft tokens.",
        SPECULATION,
        metavar="draft|ngram|draft,ngram|none",
        shown_default="draft,ngram; ngram without a draft model",
    )
    num_draft_tokens: int | None = taken_from(SpecConfig, "num_draft_tokens")
    tree_width: int | None = taken_from(SpecConfig, "tree_width")
    draft_depth: int | None = taken_from(SpecConfig, "draft_depth")
    acceptance: str = taken_from(SpecConfig, "acceptance")
    accept_threshold: float | None = taken_from(SpecConfig, "accept_threshold")
    draft_ahead: str = taken_from(SpecConfig, "draft_ahead")
    draft_window: int | None = taken_from(SpecConfig, "draft_window")
    draft_device: str = option(
        AUTO,
        "Where the draft model is computed; auto takes what should be faster.",
        SPECULATION,
        choices=DEVICES,
    )
    record_traces: Path | str | None = option(
        None,
        "Folder to record traces in, to train a draft with: prompts, output and the target's "
        "likeliest tokens.",
        SPECULATION,
        metavar="DIR",
        shown_default="none",
    )
    max_traces: str | int = option("1GiB", "Maximum size of that folder.", SPECULATION, size="1GiB")
    num_beams: int = option(1, "Beams that memory is reserved for.", at_least=1, at_most=MAX_BEAMS)
    beam_span: int = option(
        DEFAULT_BEAM_SPAN,
        "Tokens that beams may be apart: memory is reserved for this many of each.",
        BEAMS,
        at_least=1,
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid or contradictory options."""
        self._check_types()
        check_options(self)
        if "draft" in self.spec.spec_type and self.draft_model is None:
            raise ConfigError(
                FieldName("spec_type"),
                " has 'draft' but no draft model was named: give ",
                FieldName("draft_model"),
                " (-md)",
            )
        if self.exact == ON and not self.spec.is_plain_decoding:
            name = "acceptance" if self.spec.is_lossless else "accept_threshold"
            raise ConfigError(
                FieldName("exact"),
                " is 'on', but with ",
                FieldName(name),
                f" {getattr(self, name)} the tokens are not plain decoding's: leave that out, or "
                "use 'auto'",
            )
        if self.context_shift and (self.ctx_size or MIN_SHIFTED_CONTEXT) < MIN_SHIFTED_CONTEXT:
            raise ConfigError(
                FieldName("ctx_size"),
                f" is {self.ctx_size}, must be at least {MIN_SHIFTED_CONTEXT} with ",
                FieldName("context_shift"),
            )

    def _check_types(self) -> None:
        """Check the types of options without limits or choices."""
        for name in ("model", "draft_model"):
            refuse_loaded(name, getattr(self, name))
        check_type("model", self.model, str, Path)
        check_type("draft_model", self.draft_model, str, Path, type(None))
        check_type("chat_template", self.chat_template, str, Path, type(None))
        check_type("parse_special", self.parse_special, bool)
        check_type("context_shift", self.context_shift, bool)
        for name in ("prompt_cache_dir", "record_traces"):
            check_type(name, getattr(self, name), str, Path, type(None))
            if getattr(self, name) == "":
                raise ConfigError(FieldName(name), " is empty: name a folder, or leave it out")

    @cached_property
    def spec(self) -> SpecConfig:
        """Options of speculation, with defaults that depend on the models."""
        spec_type = self.spec_type
        if spec_type is None:
            spec_type = SPEC_TYPES if self.draft_model is not None else ("ngram",)
        if self.num_draft_tokens == 0:
            spec_type = ()  # no draft tokens: plain decoding, and no draft to load
        values = self.keywords(field.name for field in fields(SpecConfig))
        return SpecConfig(**{**values, "spec_type": spec_type})

    def context_of(self, max_context: int) -> int:
        """Return the tokens of the longest sequence, for a model of `max_context`."""
        requested = DEFAULT_CTX_SIZE if self.ctx_size is None else self.ctx_size or max_context
        return min(requested, max_context)

    @property
    def draft(self) -> str | Path | None:
        """Draft model to load; None if there is none, or if it would not be used."""
        if self.draft_model is None or "draft" not in self.spec.spec_type:
            return None
        return self.draft_model

    @property
    def backend(self) -> BackendOptions:
        is_exact = self.exact != OFF
        return BackendOptions(self.threads, self.cache_type_k, self.cache_type_v, is_exact)

    @property
    def may_leave_out_draft(self) -> bool:
        """Whether the plan decides if the draft model pays for its memory: no option fixes it."""
        is_fixed = self.spec_type is not None or self.num_draft_tokens is not None
        is_fixed = is_fixed or self.acceptance != "match" or self.draft_device != AUTO
        return not is_fixed and self.draft is not None

    @property
    def requires_draft(self) -> bool:
        """Whether `spec_type` requests the draft model, so that a run without it is refused."""
        return self.spec_type is not None and self.draft is not None

    def without_draft(self) -> RunOptions:
        """Return the options of the same run without its draft model."""
        spec = self.spec.without_draft()
        return replace(self, draft_model=None, spec_type=spec.spec_type, draft_window=None)

    def keywords(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the options as keywords of `specdec.load`: all, or only `names`."""
        chosen = [field.name for field in fields(self)] if names is None else names
        return {name: getattr(self, name) for name in chosen}

    def target_nodes(self, n_drafted: int) -> int:
        """Return the target's capacity of live nodes: those of a pass, or the beams."""
        n_of_beams = self.num_beams * self.beam_span if self.num_beams > 1 else 0
        return max(self.max_target_tokens(n_drafted), n_of_beams)

    def max_target_tokens(self, n_drafted: int) -> int:
        """Return the maximum nodes that one pass of the target scores: a pending token for each
        sequence, n_drafted tokens and one more for each further sequence; or the beams."""
        return max(n_drafted + 2 * self.max_num_seqs - 1, self.num_beams)

    @property
    def max_num_seqs(self) -> int:
        """Maximum sequences that are computed together."""
        return DEFAULT_PARALLEL if self.parallel is None else self.parallel

    @property
    def max_kept_seqs(self) -> int:
        """Maximum sequences that have KV at a time: running ones, as many cached ones, and one."""
        return 2 * self.max_num_seqs + 1

    def min_kv_tokens(self, ctx_size: int) -> int:
        """Return the minimum capacity of the KV caches, in tokens of all sequences together: one
        context, or what was requested."""
        return max(ctx_size, self.kv_tokens or 0)


set_keywords(keywords_by_option(RunOptions, SamplingParams))

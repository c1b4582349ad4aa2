"""The Python API: load a target and a draft into a memory budget, generate, stream.

with specdec.load("TARGET", "DRAFT", memory_budget="3.5GiB") as llm:
    for chunk in llm.stream("def fibonacci(n):", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from backends.contract.backend import Backend
from offload.process.interruptible import POLL_SECONDS
from specdec.analysis.utilization import model_flops
from specdec.checks import ConfigError
from specdec.config import SpecConfig
from specdec.decoding.ahead_thread import AheadThread
from specdec.decoding.errors import ModelBusy, ModelClosed, ModelElsewhere
from specdec.decoding.generation import PLAIN, GenerationStream
from specdec.decoding.prompt_cache import PromptCache
from specdec.decoding.sequences import CompletionOutput, GenerationResult, StreamChunk
from specdec.drafters.base import Drafter
from specdec.drafters.ngram import NgramDrafter
from specdec.planning.load import check_spec, load_draft, load_target
from specdec.planning.plan import plan_models
from specdec.planning.run_options import RunOptions, run_options
from specdec.planning.run_plan import RunPlan
from specdec.policy.draft_policy import DraftPolicy
from specdec.policy.lessons import Experience
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import Prompt, PromptError, check_room, encode_prompt

__all__ = [
    "LLM",
    "CompletionOutput",
    "GenerationResult",
    "ModelBusy",
    "ModelClosed",
    "ModelElsewhere",
    "Prompt",
    "PromptError",
    "StreamChunk",
    "load",
]


def load(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    progress: Any = None,
    **options: Any,
) -> LLM:
    """Load a target and, if named, its draft.

    Args:
        model: directory, GGUF file, hub id or `pair:target`; layers stream where they do not fit.
        draft_model: a small model with the same vocabulary, of either format.
        progress: called with (bytes done, bytes in total) by another thread while weights are read.
        options:
            memory_budget: limit of the whole process, "3.5GiB", bytes, or "auto" (the cgroup's
                limit, or what other processes leave free if that is less).
            ctx_size: most tokens of prompt and output; memory for their KV is set aside.
            spec_type: "draft", "ngram", "draft,ngram" or "none".
            num_draft_tokens, tree_width, draft_depth: size of the tree; chosen when left out.
            acceptance: "match" (any tree, reproducible), "rejection" or "block" (a sampled chain).
            accept_threshold: lossy; accept draft tokens of at least this target probability.
            draft_ahead: "auto", "on" or "off": draft while the target's pass runs.
            prompt_cache_file: KV of the last text, restored from there and saved at the end.
            draft_window: recent tokens that the draft is shown of a long context; all when None.
            load_mode: "auto", "stream", "ram" or "mmap" (GGUF).
            device: "cpu", "cuda" or "auto": where the target is computed (checkpoints).
            vram_budget: GPU memory of the whole process, "8GiB", bytes, or "auto" (what is free).
            draft_device: "cpu", "cuda" or "auto" (what should be faster).
            cache_type_k, cache_type_v: "f16", "q8_0" or "q4_0" (GGUF).
            num_beams: beams that `generate(num_beams=...)` may use; beam_span: tokens that they may
                be apart. Memory is set aside for num_beams * beam_span live tokens.
            threads: of the computation; prefetch_depth: slots of the ring; io_threads: readers.

    Raises:
        SpecdecError: one line that names what is wrong and what to do.
    """
    return LLM(run_options(model, draft_model, **options), progress)


class LLM:
    """A loaded target with its draft.

    One generation runs at a time: starting another one cancels a stream that was left half read,
    and is refused (ModelBusy) while one computes. `close` may be called by any thread.
    """

    def __init__(self, options: RunOptions, progress: Any = None) -> None:
        self._running: GenerationStream | None = None
        self._starting = threading.Lock()
        self._closing = threading.RLock()
        self._is_closed = False
        self._process_id = os.getpid()
        with ExitStack() as stack:  # whatever was opened is closed when a later part fails
            planned = plan_models(options)
            self.plan: RunPlan = planned.plan
            self._options = options = planned.options
            self.tokenizer = planned.target.tokenizer
            self.eos_token_ids = planned.target.eos_token_ids
            self._model_context = planned.target.source.max_context
            self._prompt_cache: PromptCache | None = None
            if options.prompt_cache_file is not None:
                path = options.prompt_cache_file
                self._prompt_cache = PromptCache(path, planned.target, planned.draft)
            self.target: Backend = stack.enter_context(load_target(planned, options, progress))
            self.draft, self.draft_window = load_draft(planned, options.spec, self.target)
            if self.draft is not None:
                stack.enter_context(self.draft)
            self.model_flops = model_flops(
                planned.target.source.path, options.backend, self.plan.chosen.target.compute
            )
            self._ngram = NgramDrafter()
            self.ahead = AheadThread()
            # What the policy has learnt of these models: of one LLM only, it knows its costs.
            self.experience = Experience(
                self.plan.pass_cost, self.plan.draft_cost, self.plan.n_draft_tokens
            )
            if self._prompt_cache is not None:
                self._prompt_cache.restore(self.target, self.draft)
            stack.pop_all()  # from here on `close` does it

    @property
    def spec(self) -> SpecConfig:
        return self._options.spec

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return self.target.max_context

    @property
    def max_beams(self) -> int:
        """Most beams that memory was set aside for."""
        return self._options.target_rows(self.plan.n_draft_tokens)

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> GenerationResult:
        """Generate to the end; the arguments are those of `stream`."""
        stream = self.stream(prompt, sampling, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        generation_config: Any = None,
        speculative: bool = True,
        spec: SpecConfig | None = None,
        logits_processors: Sequence[Any] = (),
        cache_prompt: bool = True,
        drafter: Drafter | None = None,
        **overrides: Any,
    ) -> GenerationStream:
        """Iterate over chunks of text; `.result` holds everything once the iterator is exhausted.

        Of several sequences (n=...) the chunks come one sequence after the other. Beam search
        (num_beams=...) gives one chunk for each of its n sequences, at the end.

        Args:
            prompt: a text, a list of chat messages, or token ids.
            sampling: how to choose tokens; greedy, 64 tokens when left out.
            generation_config: a transformers GenerationConfig, instead of `sampling`.
            speculative: False decodes plainly, one token per pass.
            spec: how to draft, instead of what the models were loaded with.
            logits_processors: further transformers LogitsProcessors for the target's rows.
            cache_prompt: keep the KV of the tokens that this prompt and the text before it begin
                with; False computes the whole prompt anew.
            drafter: of your own, asked instead of those that the spec names; you close it.
            overrides: single options of SamplingParams, such as max_tokens=128.

        Raises:
            PromptError: empty, or longer than the context; ConfigError: contradictory options;
            ModelClosed, ModelElsewhere, ModelBusy (from the iterator, too).
        """
        params = _sampling_params(sampling, generation_config, overrides)
        self.check_open()
        if spec is not None:
            check_spec(spec, self.spec, self.plan, has_draft=self.draft is not None)
        spec = (spec or self.spec) if speculative else PLAIN
        if drafter is not None and not spec.drafters:
            raise ConfigError("a drafter was given, but this is plain decoding: leave one out")
        prompt_ids = encode_prompt(prompt, self.tokenizer)
        check_room(len(prompt_ids), self.max_context, self._model_context)
        return GenerationStream(
            self,
            prompt_ids,
            params,
            spec=spec,
            processors=logits_processors,
            cache_prompt=cache_prompt,
            drafter=drafter,
        )

    def save_prompt_cache(self) -> None:
        """Write the KV of the last prompt and its text to the `prompt_cache_file`.

        Done at the end of a `with` block that ends without an error, too.

        Raises:
            PromptCacheError: the file cannot be written; ConfigError: none was named.
            ModelClosed, ModelBusy.
        """
        if self._prompt_cache is None:
            raise ConfigError("there is no prompt_cache_file to save to: name one when loading")
        self.check_open()
        with self._starting:
            if self._running is not None:
                self._running.end()
            self.ahead.settle()  # an interrupt may have left it at work
            self._prompt_cache.save(self.target, self.draft)

    def close(self) -> None:
        """Free the models. Idempotent.

        Another thread's generation ends with ModelClosed; this waits for it. In a fork of the
        process that loaded them, they are left to the process's end.
        """
        self._is_closed = True
        if self.is_forked:
            return
        while self._running is not None and self._running.is_computing_elsewhere:
            self._cancel_passes()
            time.sleep(POLL_SECONDS)
        with self._closing, ExitStack() as stack:  # one caller frees, the others wait for it
            for backend in self.backends:
                stack.callback(backend.close)
            stack.callback(self.ahead.close)  # first, since it uses the draft

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with closing(self):
            is_open = not self._is_closed and not self.is_forked
            if exc is None and self._prompt_cache is not None and is_open:
                self.save_prompt_cache()

    # --- parts -----------------------------------------------------------------------------

    def begin(self, stream: GenerationStream) -> None:
        """`stream` starts to use the models; whatever else used them is over.

        Raises ModelBusy where another one computes at this moment.
        """
        with self._starting:
            if self._running is not None and self._running is not stream:
                self._running.end()
            self._running = stream

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The target, and the draft if there is one."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    def request_cancel(self, stream: GenerationStream) -> None:
        """End the pass that another thread is in for this stream, not for the one after it."""
        with self._starting:
            if self._running is stream and stream.is_computing_elsewhere:
                self._cancel_passes()

    def _cancel_passes(self) -> None:
        for backend in self.backends:
            backend.request_cancel()

    def forget_prompt(self) -> None:
        """Empty the KV caches: the next prompt is computed from its first token on."""
        for backend in self.backends:
            backend.rollback(0)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def check_open(self) -> None:
        """Raise ModelClosed after `close`, ModelElsewhere in a fork."""
        if self._is_closed:
            raise ModelClosed
        if self.is_forked:
            raise ModelElsewhere

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._process_id

    def policy(self, spec: SpecConfig, temperature: float = 0.0) -> DraftPolicy:
        """A policy for one generation, which knows what earlier ones have shown."""
        plan = self.plan
        return DraftPolicy(
            spec,
            plan.pass_cost,
            self.max_context,
            plan.draft_cost,
            plan.n_draft_tokens,
            experience=self.experience,
            temperature=temperature,
        )

    def ngram_drafter(self) -> Drafter:
        """The n-gram drafter; what it learned about its own hit rate lives as long as the model."""
        return self._ngram


def _sampling_params(
    sampling: SamplingParams | None, generation_config: Any, overrides: Mapping[str, Any]
) -> SamplingParams:
    if sampling is not None and generation_config is not None:
        raise ConfigError("give either sampling or generation_config, not both")
    if generation_config is not None:
        sampling = SamplingParams.from_generation_config(generation_config)
    return (sampling or SamplingParams()).replace(**overrides)

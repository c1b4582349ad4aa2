"""The Python API: load a target and a draft into a memory budget, generate, stream.

with specdec.load("TARGET", "DRAFT", memory_budget="3.5GiB") as llm:
    for chunk in llm.stream("def fibonacci(n):", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from typing_extensions import Self, Unpack

from backends.contract.backend import Backend
from offload.errors import SpecdecError
from offload.units import format_bytes
from specdec.checks import ConfigError, FieldName, check_type, refuse_unknown
from specdec.config import SpecConfig
from specdec.drafters.base import Drafter
from specdec.engine.engine_thread import CalledFromInside, ModelClosed, ModelElsewhere
from specdec.engine.many_prompts import generate_all, generate_each
from specdec.engine.sequences.outputs import CompletionOutput, GenerationResult, StreamChunk
from specdec.engine.sequences.request import Request
from specdec.engine.session import Session
from specdec.engine.stream import GenerationStream
from specdec.metrics.stats import EngineStats
from specdec.planning.keywords import LoadKeywords
from specdec.planning.load import check_spec
from specdec.planning.plan import with_named_draft
from specdec.planning.run_plan import RunPlan
from specdec.run_options import RunOptions
from specdec.sampling.keywords import SamplingKeywords
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import (
    Prompt,
    PromptError,
    check_context_capacity,
    check_vocabulary,
    encode_prompt,
    is_conversation,
)

__all__ = [
    "LLM",
    "CalledFromInside",
    "CompletionOutput",
    "EngineStats",
    "GenerationResult",
    "ModelClosed",
    "ModelElsewhere",
    "Prompt",
    "PromptError",
    "StreamChunk",
    "load",
]

_PLAIN = SpecConfig(spec_type=())


class GenerateKeywords(SamplingKeywords, total=False):
    """Keywords of `LLM.generate` beside the prompt and `sampling`: those of `LLM.stream`."""

    generation_config: Any
    speculative: bool
    spec: SpecConfig | None
    logits_processors: Sequence[Any]
    cache_prompt: bool
    priority: int
    drafter: Drafter | None


def load(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    progress: Any = None,
    **options: Unpack[LoadKeywords],
) -> LLM:
    """Load a target and, if named, its draft.

    Args:
        model: directory, GGUF file, hub id or `pair:target`; layers stream where they do not fit.
        draft_model: a small model with the same vocabulary, of either format; "mtp" is the
            target's own MTP head; "auto" takes what should be fastest of that, of heads and models
            on this machine, and of n-grams (specdec/planning/draft_ranking.py).
        progress: called with (bytes done, bytes in total) by threads that read weights, some of
            which go on while the first prompt is computed.
        options: memory, device, drafting: the fields of `specdec.run_options.RunOptions`, see
            docs/api.md.

    Raises:
        SpecdecError: one line that names what is wrong and what to do.
    """
    refuse_unknown(options, RunOptions, "load()")
    check_type("progress", progress, Callable, type(None))  # type: ignore[arg-type]  # an ABC
    return LLM(with_named_draft(RunOptions(model, draft_model, **options)), progress)


class LLM:
    """A loaded target with its draft.

    Any number of threads may generate at a time: up to `parallel` sequences share passes, others
    wait. `close` may be called by any thread.
    """

    def __init__(
        self,
        options: RunOptions,
        progress: Any = None,
        prepare: Callable[[RunOptions], None] | None = None,
    ) -> None:
        session = self.session = Session(options, progress, prepare)
        self.tokenizer = session.tokenizer

    def __repr__(self) -> str:
        options, plan = self.session.options, self.plan
        words = [repr(str(options.model))]
        if options.draft is not None:
            words.append(f"draft_model={str(options.draft_model)!r}")
        words.append(f"memory_budget={format_bytes(plan.budget_bytes)!r}")
        words.append(f"device={plan.device!r}")
        words.append(f"ctx_size={self.max_context}")
        state = "" if self.session.is_open else ", closed"
        return f"<specdec.LLM {', '.join(words)}{state}>"

    @property
    def plan(self) -> RunPlan:
        """The plan of the run; another one after `set_memory_budget`."""
        return self.session.plan

    @property
    def spec(self) -> SpecConfig:
        """How the run drafts, unless a request says otherwise."""
        return self.session.options.spec

    @property
    def target(self) -> Backend:
        return self.session.models.target

    @property
    def draft(self) -> Backend | None:
        return self.session.models.draft

    def set_memory_budget(self, memory_budget: str | int) -> RunPlan:
        """Change the memory budget while generations run; return the new plan.

        It waits for the step that runs. Texts stay the same. Layers that come and go take what
        changes where that is enough. Otherwise the models are loaded again as planned for the new
        budget: running sequences go on, and the KV of finished ones is dropped.

        Args:
            memory_budget: as for `load`: "2GiB", bytes, or "auto".

        Raises:
            ConfigError: above the memory limit of this process; BudgetExceeded: too small for this
            run, with the smallest budget that works (both change nothing);
            ModelClosed, ModelElsewhere, CalledFromInside.
        """
        return self.session.set_memory_budget(memory_budget)

    @property
    def max_context(self) -> int:
        """Maximum tokens of a sequence, prompt included."""
        return self.target.max_context

    @property
    def stats(self) -> EngineStats:
        """Metrics of all generations since loading, from any thread, also after `close`."""
        return self.session.statistics.of_all

    @overload
    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> list[GenerationResult]: ...

    def generate(self, prompt: Any, sampling: Any = None, **options: Any) -> Any:
        """Generate to the end; the arguments are those of `stream`.

        Args:
            prompt: one, or a list whose prompts share passes; results are in the same order.
            sampling: parameters for all prompts, or a list with one for each.

        An error of one of several prompts ends all.
        """
        is_list = isinstance(prompt, (list, tuple)) and len(prompt) > 0
        if is_list and isinstance(prompt[0], (str, list, tuple)):
            return self._generate_many(prompt, sampling, **options)
        stream = self.stream(prompt, sampling, **options)
        for _ in stream:
            pass
        return stream.result

    def generate_each(
        self, requests: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Iterator[tuple[int, GenerationResult | SpecdecError]]:
        """Generate for many prompts; yield (index of the request, its result) as each is finished.

        Requests are taken in the calling thread, up to twice as many as share a pass, so that they
        may be an endless iterator. An error of one request (its prompt is too long, say) is yielded
        in place of its result; an error that concerns all of them (failing storage, a closed model)
        is raised.
        """
        check_type("requests", requests, Iterable)
        yield from generate_each(
            requests, self.stream, lambda: 2 * self.session.options.max_num_seqs
        )

    def _generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        **options: Any,
    ) -> list[GenerationResult]:
        if isinstance(sampling, SamplingParams) or sampling is None:
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise ConfigError(
                f"{len(prompts)} prompts have {len(sampling)} sampling parameters: give one for "
                "each, or one for all"
            )
        return generate_all(
            self.stream(prompt, params, **options)
            for prompt, params in zip(prompts, sampling, strict=True)
        )

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
        priority: int = 0,
        drafter: Drafter | None = None,
        **overrides: Unpack[SamplingKeywords],
    ) -> GenerationStream:
        """Iterate over chunks of text; `.result` is complete once the iterator is exhausted.

        Chunks of several sequences (n=...) interleave. Beam search (num_beams=...) gives one chunk
        for each of its n sequences, at the end.

        Args:
            prompt: a string, a list of chat messages, or token ids. An answer in a conversation
                ends with its turn, other output with the model's end-of-sequence tokens.
            sampling: how to choose tokens; greedy, 64 tokens by default.
            generation_config: a transformers GenerationConfig, instead of `sampling`.
            speculative: False decodes plainly, one token per pass.
            spec: how to draft, instead of the configuration the models were loaded with.
            logits_processors: transformers LogitsProcessors for the target's logits.
            cache_prompt: reuse cached KV of the prompt's prefix; False recomputes the prompt.
            priority: sequences of larger priority are scheduled first and preempted last.
            drafter: your own, in place of the drafters that the spec names.
            overrides: single options of SamplingParams, such as max_tokens=128.

        Raises:
            PromptError: empty, or longer than the context; ConfigError: contradictory options;
            ModelClosed, ModelElsewhere, CalledFromInside (also from the iterator).
        """
        check_type("sampling", sampling, SamplingParams, type(None))
        check_type("spec", spec, SpecConfig, type(None))
        check_type("drafter", drafter, Drafter, type(None))
        check_type("speculative", speculative, bool)
        check_type("cache_prompt", cache_prompt, bool)
        check_type("priority", priority, int)
        check_type("logits_processors", logits_processors, Sequence)
        for processor in logits_processors:
            if not callable(processor):
                name = FieldName("logits_processors")
                raise ConfigError("one of ", name, f" is {processor!r}, must be Callable")
        params = _sampling_params(sampling, generation_config, overrides)
        self.session.engine.check_open()
        if spec is not None:
            # In this order: the draft is said to be left out before it is closed.
            has_draft, is_left_out = self.draft is not None, self.session.has_left_out_draft
            if is_left_out and drafter is None:
                spec = spec.without_draft()
            check_spec(spec, self.spec, self.plan, has_draft=has_draft or is_left_out)
        spec = (spec or self.spec) if speculative else _PLAIN
        if drafter is not None and not spec.drafters:
            raise ConfigError("a drafter was given, but this is plain decoding: leave one out")
        if is_conversation(prompt):
            params = self.session.chat_params(params)
        prompt_ids = encode_prompt(prompt, self.tokenizer)
        check_vocabulary(prompt_ids, self.target.vocab_size)
        check_context_capacity(len(prompt_ids), self.max_context, self.session.model_context)
        request = Request(
            prompt_ids,
            params,
            spec,
            processors=logits_processors,
            cache_prompt=cache_prompt,
            priority=priority,
            drafter=drafter,
        )
        return GenerationStream(self.session, request)

    def close(self) -> None:
        """Free the models. Idempotent.

        Wait for running generations, which end with ModelClosed. In the engine's thread (a logits
        processor, say) the models are freed after the step. A fork leaves them to its exit.
        """
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _sampling_params(
    sampling: SamplingParams | None, generation_config: Any, overrides: Mapping[str, Any]
) -> SamplingParams:
    if sampling is not None and generation_config is not None:
        names = FieldName("sampling"), FieldName("generation_config")
        raise ConfigError("give either ", names[0], " or ", names[1], ", not both")
    if generation_config is not None:
        sampling = SamplingParams.from_generation_config(generation_config)
    return (sampling or SamplingParams()).replace(**overrides)

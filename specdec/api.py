"""The Python API: load a target and a draft into a memory budget, generate, stream.

with specdec.load("TARGET", "DRAFT", memory_budget="3.5GiB") as llm:
    for chunk in llm.stream("def fibonacci(n):", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, overload

from typing_extensions import Self, Unpack

from offload.errors import SpecdecError
from specdec.checks import ConfigError, FieldName, check_type, refuse_unknown
from specdec.config import SpecConfig
from specdec.drafters.base import Drafter
from specdec.engine.engine_thread import CalledFromInside, ModelClosed, ModelElsewhere
from specdec.engine.outputs import CompletionOutput, GenerationResult, StreamChunk
from specdec.engine.request import Request
from specdec.engine.session import Session
from specdec.engine.stream import GenerationStream
from specdec.grammar.state import GrammarError
from specdec.metrics.stats import EngineStats
from specdec.models.drafts import named_draft
from specdec.planning.load import check_spec
from specdec.run_options import LoadKeywords, RunOptions
from specdec.sampling.params import SamplingParams
from specdec.sampling.processors import SamplingError
from specdec.text.chat_format import ChatTemplateError
from specdec.text.contract import TokenizerError
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
_OF_ONE_REQUEST = (
    ChatTemplateError,
    ConfigError,
    GrammarError,
    PromptError,
    SamplingError,
    TokenizerError,
)
"""Errors that another prompt with other options would not have met."""


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
        draft_model: a small model with the same vocabulary, of either format; "auto" takes one that
            is on this machine (`best_draft` of specdec/models/drafts.py).
        progress: called with (bytes done, bytes in total) by threads that read weights, some of
            which go on while the first prompt is computed.
        options: memory, device, how to draft; docs/api.md says what each one means, and so do the
            fields of `specdec.run_options.RunOptions`.

    Raises:
        SpecdecError: one line that names what is wrong and what to do.
    """
    refuse_unknown(options, RunOptions, "load()")
    check_type("progress", progress, Callable, type(None))  # type: ignore[arg-type]  # an ABC
    return LLM(RunOptions(model, named_draft(model, draft_model), **options), progress)


class LLM:
    """A loaded target with its draft.

    Any number of threads may generate at a time: their sequences share passes, up to `parallel` of
    them, and others wait for their turn. `close` may be called by any thread.
    """

    def __init__(
        self,
        options: RunOptions,
        progress: Any = None,
        prepare: Callable[[RunOptions], None] | None = None,
    ) -> None:
        """See Session."""
        session = self.session = Session(options, progress, prepare)
        self.plan, self.spec = session.plan, session.options.spec
        self.tokenizer = session.tokenizer
        self.target, self.draft = session.target, session.draft

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return self.target.max_context

    @property
    def stats(self) -> EngineStats:
        """Figures of all generations since the models were loaded. Any thread may ask at any time;
        after `close`, too."""
        return self.session.stats

    @overload
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[GenerationResult]: ...

    def generate(self, prompt: Any, sampling: Any = None, **options: Any) -> Any:
        """Generate to the end; the arguments are those of `stream`.

        Args:
            prompt: one, or a list of them, which share passes; the results are in their order.
            sampling: for all prompts, or a list with one for each.

        Of several prompts an error of one ends all.
        """
        if (
            isinstance(prompt, (list, tuple))
            and prompt
            and isinstance(prompt[0], (str, list, tuple))
        ):
            return self._generate_many(prompt, sampling, **options)
        stream = self.stream(prompt, sampling, **options)
        for _ in stream:
            pass
        return stream.result

    def generate_each(
        self, requests: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Iterator[tuple[int, GenerationResult | SpecdecError]]:
        """Generate for many prompts: (index of the request, its result) as each is finished.

        Requests are drawn in the calling thread and only as there is room for them, so that they
        may be without end; twice as many as share a pass, so that none of its rows stays empty.
        What is wrong with one request (its prompt is too long, say) comes in place of its result;
        what concerns all of them (storage that fails, a model that was closed) is raised.
        """
        check_type("requests", requests, Iterable)
        drawn, running = enumerate(requests), dict[int, GenerationStream]()
        changed = SimpleQueue[int]()
        is_at_end = False
        try:
            while running or not is_at_end:
                while len(running) < 2 * self.session.options.parallel and not is_at_end:
                    request = next(drawn, None)
                    if request is None:
                        is_at_end = True
                        break
                    index, asked = request
                    try:
                        running[index] = self.stream(*_checked_pair(asked))
                    except _OF_ONE_REQUEST as error:
                        yield index, error
                    else:
                        running[index].start(
                            is_streamed=False, on_output=partial(changed.put, index)
                        )
                if running:
                    index = changed.get()
                    stream = running.get(index)  # None: the last chunk of one that has ended
                    if stream is not None and stream.is_over:
                        yield index, _outcome(running.pop(index))
        finally:
            for stream in running.values():
                stream.cancel()

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
        with ExitStack() as stack:
            streams = []
            for prompt, params in zip(prompts, sampling, strict=True):
                streams.append(self.stream(prompt, params, **options))
                stack.callback(streams[-1].cancel)
            for stream in streams:
                stream.start(is_streamed=False)
            for stream in streams:
                for _ in stream:
                    pass
            return [stream.result for stream in streams]

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
        **overrides: Any,
    ) -> GenerationStream:
        """Iterate over chunks of text; `.result` holds everything once the iterator is exhausted.

        The chunks of several sequences (n=...) come in turns. Beam search
        (num_beams=...) gives one chunk for each of its n sequences, at the end.

        Args:
            prompt: a text, a list of chat messages, or token ids. An answer in a conversation ends
                with its turn, where a text ends with the model's end-of-sequence tokens.
            sampling: how to choose tokens; greedy, 64 tokens when left out.
            generation_config: a transformers GenerationConfig, instead of `sampling`.
            speculative: False decodes plainly, one token per pass.
            spec: how to draft, instead of what the models were loaded with.
            logits_processors: further transformers LogitsProcessors for the target's rows.
            cache_prompt: keep the KV of the tokens that this prompt and the text before it begin
                with; False computes the whole prompt anew.
            priority: of sequences that wait for room, larger ones enter first and are set aside last.
            drafter: of your own, asked instead of those that the spec names.
            overrides: single options of SamplingParams, such as max_tokens=128.

        Raises:
            PromptError: empty, or longer than the context; ConfigError: contradictory options;
            ModelClosed, ModelElsewhere, CalledFromInside (from the iterator, too).
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
                raise ConfigError(
                    "one of ",
                    FieldName("logits_processors"),
                    f" is {processor!r}, must be Callable",
                )
        params = _sampling_params(sampling, generation_config, overrides)
        self.session.check_open()
        if spec is not None:
            check_spec(spec, self.spec, self.plan, has_draft=self.draft is not None)
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

    def save_prompt_cache(self) -> None:
        """Write the KV of the last prompt and its text to the `prompt_cache_file`.

        Done at the end of a `with` block that ends without an error, too.

        Raises:
            PromptCacheError: the file cannot be written; ConfigError: none was named.
            ModelClosed.
        """
        self.session.save_prompt_cache()

    def close(self) -> None:
        """Free the models. Idempotent.

        Another thread's generation ends with ModelClosed; this waits for it. Where the engine's
        thread calls this (in a logits processor, say), the models are freed behind its step. In a
        fork of the process that loaded them, they are left to the process's end.
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
        with closing(self):
            is_saved = self.session.options.prompt_cache_file is not None
            if exc is None and is_saved and self.session.is_open:
                self.save_prompt_cache()


def _checked_pair(asked: Any) -> tuple[Prompt, SamplingParams | None]:
    if not isinstance(asked, (tuple, list)) or len(asked) != 2:
        raise ConfigError(f"a request is {asked!r:.50}, must be (prompt, sampling parameters)")
    return asked[0], asked[1]


def _outcome(stream: GenerationStream) -> GenerationResult | SpecdecError:
    """Of a stream that is over; raises what concerns others as well."""
    error = stream.take_error()
    if error is None:
        return stream.result
    if isinstance(error, _OF_ONE_REQUEST):
        return error
    raise error


def _sampling_params(
    sampling: SamplingParams | None, generation_config: Any, overrides: Mapping[str, Any]
) -> SamplingParams:
    if sampling is not None and generation_config is not None:
        raise ConfigError(
            "give either ",
            FieldName("sampling"),
            " or ",
            FieldName("generation_config"),
            ", not both",
        )
    if generation_config is not None:
        sampling = SamplingParams.from_generation_config(generation_config)
    return (sampling or SamplingParams()).replace(**overrides)

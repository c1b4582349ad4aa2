"""A session: loaded models, and what else lives from one generation to the next.

One generation uses the models at a time. Another one that begins ends one that was left half read,
and is refused (ModelBusy) while one computes.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from backends.contract.backend import Backend
from offload.errors import SpecdecError
from offload.process.interruptible import POLL_SECONDS
from offload.process.remembered import forget_figures
from specdec.analysis.utilization import model_flops
from specdec.checks import ConfigError
from specdec.config import SpecConfig
from specdec.decoding.ahead_thread import AheadThread
from specdec.decoding.controller import Controller, NoDrafter
from specdec.decoding.kept_experience import KeptExperience
from specdec.decoding.prompt_cache import PromptCache, check_file
from specdec.decoding.recorder import StatsRecorder
from specdec.decoding.spare_memory import SpareMemory
from specdec.decoding.stats import PassTime
from specdec.drafters.base import Drafter
from specdec.drafters.candidates import CandidateRanker
from specdec.drafters.grammar import GrammarDrafter, within_grammar
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.state import GrammarState
from specdec.planning.early import begin_early, remember_early
from specdec.planning.load import load_draft, load_target
from specdec.planning.parts import DRAFTING_PARTS
from specdec.planning.plan import budget_of_run, plan_models
from specdec.planning.run_options import RunOptions
from specdec.policy.draft_policy import DraftPolicy
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

_CONTRADICTION = 1.5
"""Times what the plan says of a pass. Other programs make passes longer now and then; what was
measured beside them a month ago may be wrong for good."""
_ENOUGH_PASSES = 8
_CHAIN_STREAM = 2**64 - 1
"""Key word of the chain rules' random numbers; positions, the match rule's, never get there."""


class ModelClosed(SpecdecError):
    """A model was asked for something after its end."""

    def __init__(self) -> None:
        super().__init__("the model is closed; load it again")


class ModelElsewhere(SpecdecError):
    """A forked process asked for something of its parent's model."""

    def __init__(self) -> None:
        super().__init__(
            "the model was loaded by another process, and its threads are not in this fork of it: "
            "load it here"
        )


class ModelBusy(SpecdecError):
    """A generation was asked for while another one computes."""

    def __init__(self) -> None:
        super().__init__(
            "an LLM runs one generation at a time: wait for the one that is running, "
            "or load the model once more"
        )


class Running(Protocol):
    """The generation that uses the models, as far as a session has to know it."""

    @property
    def is_computing_elsewhere(self) -> bool:
        """Whether another thread computes for it."""

    @property
    def is_computing_here(self) -> bool:
        """Whether the calling thread computes for it, further up its stack."""

    def end(self) -> None:
        """End it; raises ModelBusy where a thread computes for it."""


class Session:
    """Loads models where the plan wants them, and keeps them until `close`.

    Args:
        options: what to load, and into how much memory.
        progress: called with (bytes done, bytes in total) by threads that read weights, some of
            which go on while the first prompt is computed.
        prepare: called while the first weights are read, before models are opened.
    """

    def __init__(
        self,
        options: RunOptions,
        progress: Any = None,
        prepare: Callable[[RunOptions], None] | None = None,
    ) -> None:
        self._running: Running | None = None
        self._beginning = threading.Lock()
        self._freeing = threading.RLock()
        self._is_closed = False
        self._process_id = os.getpid()
        if options.prompt_cache_file is not None:
            check_file(options.prompt_cache_file)
        with ExitStack() as stack:  # whatever was opened is closed when a later part fails
            budget = budget_of_run(options.memory_budget)
            early = stack.enter_context(begin_early(options, budget[0], progress))
            if prepare is not None:
                prepare(options)
            planned = plan_models(options, budget, early)
            self.plan, self.options = planned.plan, planned.options
            self.tokenizer = planned.target.tokenizer
            self.eos_token_ids = planned.target.eos_token_ids
            self._grammars = GrammarCompiler(self._grammar_tokenizer)
            self.model_context = planned.target.source.max_context
            self._prompt_cache: PromptCache | None = None
            if self.options.prompt_cache_file is not None:
                path = self.options.prompt_cache_file
                self._prompt_cache = PromptCache(path, planned.target, planned.draft)
            self.target: Backend = stack.enter_context(
                load_target(planned, self.options, progress, early)
            )
            remember_early(options, self.plan, planned.target.source)
            self.draft, self.draft_window = load_draft(planned, self.options.spec, self.target)
            if self.draft is not None:
                stack.enter_context(self.draft)
            self.model_flops = model_flops(
                planned.target.source.path, self.options.backend, self.plan.chosen.target.compute
            )
            # What the n-grams learn of their own hit rate, and the policy of these models.
            self._ngram = NgramDrafter()
            self._kept_experience = KeptExperience(planned)
            self.experience = self._kept_experience.experience
            parts = dict(self.plan.parts)
            self.spare = SpareMemory(
                self.target,
                self.draft,
                self.plan.budget_bytes,
                activation_bytes=parts.get("target activations", 0),
                most_rows=self.max_beams,
                draft_bytes=sum(parts.get(name, 0) for name in DRAFTING_PARTS),
            )
            self._ahead = AheadThread()
            if self._prompt_cache is not None:
                self._prompt_cache.restore(self.target, self.draft)
            stack.pop_all()  # from here on `close` does it

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The target, and the draft if there is one."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def n_tokens(self) -> int:
        """Tokens that both the tokenizer and the target know."""
        return min(self.tokenizer.n_tokens, self.target.vocab_size)

    @property
    def max_beams(self) -> int:
        """Most beams that memory was set aside for."""
        return self.options.target_rows(self.plan.n_draft_tokens)

    def begin_grammar(self, params: SamplingParams, prompt_length: int) -> GrammarState | None:
        """What a text of these parameters keeps to, if anything; before its first token."""
        if params.constraint is None:
            return None
        end_ids = params.resolve_eos(self.eos_token_ids)
        return self._grammars.begin(params.constraint, prompt_length, end_ids)

    def _grammar_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """Of a large vocabulary it takes some 100 MB of the headroom: what was lent goes back."""
        with self._beginning:
            running = self._running
            if running is None or not running.is_computing_elsewhere:
                self.spare.give_back()
        return self.tokenizer.grammar_tokenizer(end_ids)

    def forget_prompt(self) -> None:
        """Empty the KV caches: the next prompt is computed from its first token on."""
        for backend in self.backends:
            backend.rollback(0)

    def save_prompt_cache(self) -> None:
        """Write the KV of the last prompt and its text to the file that the options name.

        Raises PromptCacheError, ConfigError (no file was named), ModelClosed, ModelBusy.
        """
        if self._prompt_cache is None:
            raise ConfigError("there is no prompt_cache_file to save to: name one when loading")
        self.check_open()
        with self._beginning:
            self._end_running()
            self.spare.give_back()
            self._prompt_cache.save(self.target, self.draft)

    def check_figures(self, passes: Sequence[PassTime]) -> None:
        """Have the machine measured anew, by the next process, where the figures that the plan
        goes by are contradicted."""
        plan = self.plan.pass_cost
        alone = [one for one in passes if not one.is_drafting_ahead]
        ratios = [one.seconds / plan.seconds(one.n_rows) for one in alone]
        if len(ratios) < _ENOUGH_PASSES:
            return
        # The plan counts on no held layers: with them passes are shorter, and contradict nothing.
        least = 0 if self.target.held_bytes else 1 / _CONTRADICTION
        if not least < statistics.median(ratios) < _CONTRADICTION:
            forget_figures()

    # --- one generation at a time --------------------------------------------------------------

    def begin(self, generation: Running) -> None:
        """`generation` starts to use the models; whatever else used them is over.

        Raises ModelBusy where another one computes at this moment; ModelClosed, ModelElsewhere.
        """
        with self._beginning:
            if self._running is not generation:
                self._end_running()
            self._running = generation  # before the check: `close` finds it, or it finds `close`
        self.check_open()

    def _end_running(self) -> None:
        running = self._running
        if running is not None:
            running.end()

    def finish(self, generation: Running) -> None:
        """`generation` uses the models no more. Where they were closed inside of it, they are freed
        here."""
        if self._running is not generation:
            return  # it was refused, inside of the one that runs
        self._running = None  # first: a `close` from here on frees them itself
        if self._is_closed:
            self.close()

    def request_cancel(self, generation: Running) -> None:
        """End the pass that another thread is in for this one, not for the one after it."""
        with self._beginning:
            if self._running is generation and generation.is_computing_elsewhere:
                self._cancel_passes()

    def _cancel_passes(self) -> None:
        for backend in self.backends:
            backend.request_cancel()

    def controller(
        self, sampler: Sampler, spec: SpecConfig, recorder: StatsRecorder, drafter: Drafter | None
    ) -> Controller:
        """The loop of one sequence.

        Args:
            sampler: the sequence's, with its own seed.
            drafter: of the caller's own, instead of those that `spec` names.
        """
        rng = np.random.Generator(
            np.random.Philox(key=np.array([sampler.seed, _CHAIN_STREAM], dtype=np.uint64))
        )
        if drafter is None:
            drafter = self._drafter(sampler, spec, rng)
        else:
            drafter.reset()
        policy = DraftPolicy(
            spec,
            self.plan.pass_cost,
            self.target.max_context,
            self.plan.draft_cost,
            self.plan.n_draft_tokens,
            experience=self.experience,
            temperature=sampler.params.temperature,
        )
        return Controller(
            self.target,
            drafter,
            sampler,
            policy,
            spec,
            recorder=recorder,
            ahead=self._ahead,
            rng=rng,
        )

    def _drafter(self, sampler: Sampler, spec: SpecConfig, rng: np.random.Generator) -> Drafter:
        drafters: list[Drafter] = []
        if "draft" in spec.drafters and self.draft is not None:
            chain = (sampler, rng) if spec.draws_chains else None
            n_tokens = min(sampler.n_tokens, self.draft.vocab_size)
            ranker = CandidateRanker.for_target(sampler, n_tokens)
            window = self.draft_window
            drafters.append(
                ModelDrafter(self.draft, n_tokens, chain=chain, ranker=ranker, window=window)
            )
        if "ngram" in spec.drafters:
            self._ngram.reset()  # a model's drafter finds by itself what its cache has of the text
            drafters.append(within_grammar(self._ngram, sampler.grammar))
        if not drafters:
            return NoDrafter()
        if sampler.grammar is not None and not spec.draws_chains:
            drafters.append(
                GrammarDrafter(sampler.grammar.fork(), sampler.n_tokens, self.target.max_context)
            )
        return drafters[0] if len(drafters) == 1 else MergedDrafter(drafters)

    # --- the end -------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that loaded the models."""
        return os.getpid() != self._process_id

    @property
    def is_open(self) -> bool:
        return not self._is_closed and not self.is_forked

    def check_open(self) -> None:
        """Raise ModelClosed after `close`, ModelElsewhere in a fork."""
        if self._is_closed:
            raise ModelClosed
        if self.is_forked:
            raise ModelElsewhere

    def close(self) -> None:
        """Free the models; any thread may call it. Idempotent.

        Another thread's generation ends with ModelClosed; this waits for it. So does one that this
        thread is inside of (in a signal handler, say), and it frees the models at its end. In a
        fork the models are left to the process's end.
        """
        self._is_closed = True
        if self.is_forked:
            return
        while (running := self._running) is not None and running.is_computing_elsewhere:
            self._cancel_passes()
            time.sleep(POLL_SECONDS)
        if running is not None and running.is_computing_here:
            self._cancel_passes()
            return  # the frames below use what would be freed: `finish` does it
        with self._freeing, ExitStack() as stack:  # one caller frees, the others wait for it
            stack.callback(self._kept_experience.save)  # last, when the memory is free again
            for backend in self.backends:
                stack.callback(backend.close)
            stack.callback(self._ahead.close)  # first, since it uses the draft

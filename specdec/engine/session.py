"""A session: loaded models, their engine, caches and statistics."""

from __future__ import annotations

import os
import statistics
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from backends.contract.backend import Backend
from offload.process.disk_cache import forget_measurements
from offload.units import parse_bytes
from specdec.analysis.utilization import ModelFlops, model_flops
from specdec.drafters.assembly import Drafters
from specdec.engine.assembly import assemble
from specdec.engine.budget import change_budget, reload, watching_limit
from specdec.engine.draft_worker import DraftWorker
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import ModelClosed, ModelElsewhere
from specdec.engine.prompt_cache import PromptCacheFolder
from specdec.engine.request_stats import stats_of
from specdec.engine.sequences.factory import SequenceFactory
from specdec.engine.sequences.request import Request
from specdec.engine.sequences.sequence import Sequence
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.state import GrammarState
from specdec.metrics.recorder import StatsRecorder, Totals
from specdec.metrics.stats import EngineStats, GenerationStats, MeasuredPass
from specdec.planning.loaded import LoadedModels
from specdec.planning.memory.base import budget_of_run
from specdec.planning.plan import PlannedModels, plan_models
from specdec.planning.run_plan import RunPlan
from specdec.policy.pair_statistics import PairStatistics
from specdec.run_options import RunOptions
from specdec.sampling.context_window import ContextWindow
from specdec.sampling.params import SamplingParams
from specdec.text.chat_format import ChatFormat
from specdec.text.conversation import end_of_turn
from specdec.traces.recorder import TraceRecorder

_REMEASURE_RATIO = 1.5
"""Ratio of measured to planned pass times at which the machine is measured again: the cached
measurement may have been taken beside other programs."""
_ENOUGH_PASSES = 8


class Session:
    """Models loaded as planned, with their engine, until `close`.

    Args:
        options: models, memory budget and other options of the run.
        progress: called with (bytes done, bytes in total) by threads that read weights, some of
            which go on while the first prompt is computed.
        prepare: called before models are opened.
    """

    def __init__(
        self,
        options: RunOptions,
        progress: Any = None,
        prepare: Callable[[RunOptions], None] | None = None,
    ) -> None:
        self._process_id = os.getpid()
        self._last_stats: EngineStats | None = None
        self._ends_of_turns: dict[ChatFormat, int | None] = {}
        self._grammars = GrammarCompiler(self._grammar_tokenizer)
        self._model_flops: tuple[ModelFlops | None] | None = None  # not computed yet
        self._stats_lock = threading.RLock()  # held while backends are asked
        self._prompt_cache: PromptCacheFolder | None = None
        if options.prompt_cache_dir is not None:
            max_bytes = parse_bytes(options.prompt_cache_size)
            self._prompt_cache = PromptCacheFolder(options.prompt_cache_dir, max_bytes)
        self.engine = Engine()
        try:
            self.engine.call(lambda: self._load(options, progress, prepare))
        except KeyboardInterrupt:  # libraries may still be imported: not waited for
            self.engine.close_soon()
            raise
        except BaseException:
            self.engine.close()
            raise
        # An unreferenced session frees its models; the engine's thread does not refer to it.
        weakref.finalize(self, self.engine.close)

    def _load(
        self, options: RunOptions, progress: Any, prepare: Callable[[RunOptions], None] | None
    ) -> None:
        """Load the models in the engine's thread, so that OpenMP's workers belong to it."""
        engine = self.engine

        def note(n_done: int, n_total: int) -> None:
            if engine.is_closing:
                raise ModelClosed
            if progress is not None:
                progress(n_done, n_total)

        budget = budget_of_run(options.memory_budget)
        # Everything opened is closed if a later part fails.
        with ExitStack() as stack:
            if prepare is not None:
                prepare(options)
            planned = plan_models(options, budget)
            self.tokenizer = planned.target.tokenizer
            self.eos_token_ids = planned.target.eos_token_ids
            self._chat_eos_token_ids = planned.target.chat_eos_token_ids
            self.model_context = planned.target.source.max_context
            self.models = LoadedModels()
            stack.callback(self.models.close)
            self.models.load(planned, note)
            self._target_path = planned.target.source.path.absolute()
            self._trace_recorder = self._new_recorder(planned, stack)
            self.totals, self._worker = Totals(), DraftWorker()
            stack.callback(self._worker.close)  # before the draft, which it uses
            self._assemble()
            stack.callback(_note_last_stats, weakref.ref(self))
            engine.at_end.push(stack.pop_all())
        engine.after_step = watching_limit(weakref.ref(self))

    def _assemble(self) -> None:
        """Let the engine and new sequences use the loaded models."""
        models, plan = self.models, self.models.plan
        assemble(self.engine, models, self._worker, self.totals, self._prompt_cache)
        max_context, parallel = models.target.max_context, models.options.max_num_seqs
        draft = models.draft, models.draft_prefix_cache, models.draft_window
        window = ContextWindow()
        if models.options.context_shift:
            window = ContextWindow.of_target(max_context)
        self._factory = SequenceFactory(
            tokenizer=self.tokenizer,
            num_tokens=self.n_tokens,
            eos_token_ids=self.eos_token_ids,
            max_context=max_context,
            model_context=self.model_context,
            max_beams=models.options.max_target_tokens(plan.n_draft_tokens),
            begin_grammar=self._begin_grammar,
            drafters=Drafters(*draft, max_context, parallel, window),
            plan=plan,
            pair_statistics=models.pair_statistics,
            trace_recorder=self._trace_recorder,
            window=window,
        )

    def _new_recorder(self, planned: PlannedModels, stack: ExitStack) -> TraceRecorder | None:
        folder = self.options.record_traces
        if folder is None:
            return None
        max_bytes = parse_bytes(self.options.max_traces)
        fingerprint = planned.target.source.fingerprint()
        recorder = TraceRecorder(folder, self.n_tokens, fingerprint, max_bytes)
        stack.callback(recorder.close)
        return recorder

    # --- the loaded models ---------------------------------------------------------------------

    @property
    def plan(self) -> RunPlan:
        return self.models.plan

    @property
    def options(self) -> RunOptions:
        return self.models.options

    @property
    def target(self) -> Backend:
        return self.models.target

    @property
    def draft(self) -> Backend | None:
        return self.models.draft

    def set_memory_budget(self, memory_budget: str | int) -> RunPlan:
        """Change the memory budget between two steps; return the new plan.

        Raises ConfigError, BudgetExceeded and other errors of `change_budget`.
        """
        self.check_open()
        replace(self.options, memory_budget=memory_budget)  # checks it
        budget = budget_of_run(memory_budget)

        def change() -> RunPlan:
            self.change_budget(*budget)
            return self.plan  # before another change

        return self.engine.call(change)

    def change_budget(self, total_bytes: int, source: str) -> None:
        """Change the budget, in the engine's thread. Raises errors of `change_budget`."""
        change_budget(self.engine, self.models, total_bytes, source, self._reload)

    def _reload(self, planned: PlannedModels) -> None:
        with self._stats_lock:
            self._last_stats = self._stats()
        try:
            reload(self.engine, self.models, planned, self._worker, self._assemble)
        finally:
            if self.is_open:
                self._last_stats = None

    def use_statistics(self, pair_statistics: PairStatistics) -> None:
        """Use other pair statistics: modes of a benchmark must not share them."""
        self._factory = replace(self._factory, pair_statistics=pair_statistics)
        scheduler = self.engine.scheduler
        assert scheduler is not None, "the models are loaded"
        scheduler.cost = scheduler.kv.cost = pair_statistics.cost

    # --- requests ------------------------------------------------------------------------------

    def new_sequences(self, request: Request) -> list[Sequence]:
        return self._factory.new_sequences(request)

    def start(self, request: Request, sequences: SequenceOf[Sequence]) -> None:
        """Hand a request to the engine; its clocks start here, not when it was created."""
        request.use_before = self.models.transfer_stats
        request.recorder = StatsRecorder(len(request.prompt_ids), totals=self.totals)
        self.engine.add(request, sequences, self)

    def prepare(self, sequence: Sequence) -> None:
        self._factory.prepare(sequence)

    def renew(self, sequence: Sequence) -> None:
        self._factory.renew(sequence)

    def note_finished(self, request: Request) -> None:
        # Nor does the plan's cost contain the reading of KV, which grows with the context.
        if not request.is_aborted and not request.is_replanned and self.plan.kv_split is None:
            self._check_pass_times(request.recorder.stats().pass_times)
        request.stats = self.stats_of(request)

    def stats_of(self, request: Request) -> GenerationStats:
        """Return the statistics of a request so far."""
        use = self.models.transfer_stats
        return stats_of(request, self.plan, use, self.model_flops, self.stats)

    def _check_pass_times(self, passes: SequenceOf[MeasuredPass]) -> None:
        """Let the next process measure the machine again if pass times contradict the plan."""
        plan = self.plan.cost_model
        # The plan assumes no opportunistic layers: a shorter pass with them is no contradiction.
        ratios = [
            max(
                one_pass.seconds / plan.planned_seconds(one_pass.num_tokens),
                1.0 if one_pass.has_pinned else 0.0,
            )
            for one_pass in passes
            if not one_pass.is_drafting_ahead
        ]
        if len(ratios) < _ENOUGH_PASSES:
            return
        if not 1 / _REMEASURE_RATIO < statistics.median(ratios) < _REMEASURE_RATIO:
            forget_measurements()

    @property
    def model_flops(self) -> ModelFlops | None:
        """FLOPs of the target; computed at first use, so that loading does not wait for it.

        Computed between passes: transformers replaces torch's process-wide default dtype meanwhile.
        """
        if self._model_flops is None and self.is_open:
            if self.engine.is_current_thread:
                self._model_flops = (self._read_flops(),)
            else:
                with suppress(ModelClosed):
                    self.engine.call(lambda: self.model_flops)
        return None if self._model_flops is None else self._model_flops[0]

    def _read_flops(self) -> ModelFlops | None:
        compute = self.plan.chosen.target.compute
        return model_flops(self._target_path, self.options.backend, compute)

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The target, and the draft if there is one."""
        return self.models.backends

    @property
    def n_tokens(self) -> int:
        """Number of tokens that both the tokenizer and the target have."""
        return min(self.tokenizer.n_tokens, self.target.vocab_size)

    def chat_params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of an answer in a conversation, which ends with its turn.

        The chat format's stop strings end it and, unless the caller gives `eos_token_ids`, the end
        tokens that the model's files name and the token that the template writes after an answer.
        """
        form = self.tokenizer.chat_format
        stops = tuple(dict.fromkeys((*params.stop, *form.stop)))
        if params.eos_token_ids is not None:
            return params.replace(stop=stops)
        if form not in self._ends_of_turns:
            self._ends_of_turns[form] = end_of_turn(self.tokenizer)
        ids = dict.fromkeys((*self._chat_eos_token_ids, self._ends_of_turns[form]))
        known = tuple(i for i in ids if i is not None and i < self.n_tokens)
        return params.replace(stop=stops, eos_token_ids=known)

    def _begin_grammar(self, params: SamplingParams, prompt_length: int) -> GrammarState | None:
        """Return the grammar state before a sequence's first token, if it has a constraint."""
        if params.constraint is None:
            return None
        end_ids = params.resolve_eos(self.eos_token_ids)
        return self._grammars.begin(params.constraint, prompt_length, end_ids)

    def _grammar_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """Return the tokenizer for grammars; a large vocabulary takes some 100 MB of headroom,
        so opportunistic layers are released first."""
        self.engine.call(lambda: self.target.set_pinned_bytes(0))
        return self.tokenizer.grammar_tokenizer(end_ids)

    def forget_prompt(self) -> None:
        """Drop the cached KV of finished sequences: the next prompt is computed in full."""

        def forget() -> None:
            for prefix_cache in (self.models.prefix_cache, self.models.draft_prefix_cache):
                if prefix_cache is not None:
                    prefix_cache.clear()

        self.engine.call(forget)

    @property
    def stats(self) -> EngineStats:
        """Statistics of all generations, from any thread; final ones after `close`."""
        with self._stats_lock:
            return self._last_stats if self._last_stats is not None else self._stats()

    def _stats(self) -> EngineStats:
        use, scheduler = self.models.transfer_stats, self.engine.scheduler
        assert scheduler is not None, "the models are loaded"
        return replace(
            self.totals.stats(),
            bytes_streamed=use.bytes_streamed,
            kv_bytes_read=use.kv_bytes_read,
            kv_bytes_written=use.kv_bytes_written,
            bytes_copied_to_device=use.bytes_copied,
            stall_seconds=use.stall_seconds,
            sequences_running=len(scheduler.running),
            sequences_waiting=len(scheduler.waiting),
            kv_bytes=sum(backend.kv_bytes for backend in self.backends),
            kv_used_bytes=sum(_kv_bytes(item, item.kv_usage.n_used) for item in self.backends),
            kv_shared_bytes=sum(_kv_bytes(item, item.kv_usage.n_shared) for item in self.backends),
            state_bytes=sum(backend.state_bytes for backend in self.backends),
            pinned_bytes=sum(backend.pinned_bytes for backend in self.backends),
            memory_budget_bytes=self.plan.budget_bytes,
        )

    # --- the end -------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self.engine.is_closing

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that loaded the models."""
        return os.getpid() != self._process_id

    @property
    def is_open(self) -> bool:
        return not self.is_closed and not self.is_forked

    def check_open(self) -> None:
        """Raise ModelClosed after `close`, ModelElsewhere in a fork."""
        if self.is_closed:
            raise ModelClosed
        if self.is_forked:
            raise ModelElsewhere

    def close(self) -> None:
        """Free the models; any thread may call it. Idempotent.

        Wait for running generations, which end with ModelClosed. In the engine's thread (a logits
        processor, say) the models are freed after the step. A fork leaves them to its exit.
        """
        if not self.is_forked:
            self.engine.close()


def _note_last_stats(session: weakref.ref[Session]) -> None:
    """Store the final statistics of all generations, for queries after `close`."""
    result = session()
    if result is not None:
        with result._stats_lock:
            result._last_stats = result._last_stats or result._stats()


def _kv_bytes(backend: Backend, n_positions: int) -> int:
    """Return the bytes that `n_positions` token positions take in a backend's KV cache."""
    return backend.kv_bytes * n_positions // max(1, backend.n_kv_allocated)

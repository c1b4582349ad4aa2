"""A session: loaded models, their engine, caches and statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from offload.units import parse_bytes
from specdec.drafters.assembly import Drafters
from specdec.engine.assembly import assemble
from specdec.engine.budget import change_budget, reload, watching_limit
from specdec.engine.draft_worker import DraftWorker
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import ModelClosed
from specdec.engine.lost_draft import LostDraft
from specdec.engine.prompt_cache import PromptCacheFolder
from specdec.engine.sequences.factory import SequenceFactory
from specdec.engine.sequences.request import Request
from specdec.engine.sequences.sequence import Sequence
from specdec.engine.session_statistics import SessionStatistics
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.state import GrammarState
from specdec.metrics.recorder import StatsRecorder, Totals
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
        self._ends_of_turns: dict[ChatFormat, int | None] = {}
        self._grammars = GrammarCompiler(self._grammar_tokenizer)
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
            self._trace_recorder = self._new_recorder(planned, stack)
            self.totals, self._worker = Totals(), DraftWorker()
            self._lost_draft = LostDraft()
            stack.callback(self._worker.close)  # before the draft, which it uses
            self.statistics = SessionStatistics(engine, self.models, self.totals)
            self._assemble()
            stack.callback(self.statistics.keep_last)
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
    def has_left_out_draft(self) -> bool:
        """Whether the draft was left out during the run; any thread may ask."""
        return self._lost_draft.is_left_out

    def set_memory_budget(self, memory_budget: str | int) -> RunPlan:
        """Change the memory budget between two steps; return the new plan.

        Raises ConfigError, BudgetExceeded and other errors of `change_budget`.
        """
        self.engine.check_open()
        replace(self.options, memory_budget=memory_budget)  # checks it
        budget = budget_of_run(memory_budget)

        def change() -> RunPlan:
            self.change_budget(*budget)
            return self.plan  # before another change

        return self.engine.call(change)

    def change_budget(self, total_bytes: int, source: str) -> None:
        """Change the budget, in the engine's thread. Raises errors of `change_budget`."""
        change_budget(self.engine, self.models, total_bytes, source, self.load_again)

    def load_again(self, planned: PlannedModels) -> None:
        """Load the models by another plan, in the engine's thread. Raises errors of `reload`."""
        with self.statistics.frozen():
            reload(self.engine, self.models, planned, self._worker, self._assemble)

    def use_statistics(self, pair_statistics: PairStatistics) -> None:
        """Use other pair statistics: modes of a benchmark must not share them. The draft stays."""
        self._lost_draft.must_stay = True
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

    def before_first(self) -> None:
        self._lost_draft.check(self.models, self.load_again)

    def prepare(self, sequence: Sequence) -> None:
        self._factory.prepare(sequence)

    def renew(self, sequence: Sequence) -> None:
        self._factory.renew(sequence)

    def note_finished(self, request: Request) -> None:
        self._lost_draft.note_finished(request)
        self.statistics.note_finished(request)

    @property
    def n_tokens(self) -> int:
        """Number of tokens that both the tokenizer and the target have."""
        return min(self.tokenizer.n_tokens, self.models.target.vocab_size)

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
        self.engine.call(lambda: self.models.target.set_pinned_bytes(0))
        return self.tokenizer.grammar_tokenizer(end_ids)

    def forget_prompt(self) -> None:
        """Drop the cached KV of finished sequences: the next prompt is computed in full."""

        def forget() -> None:
            for prefix_cache in (self.models.prefix_cache, self.models.draft_prefix_cache):
                if prefix_cache is not None:
                    prefix_cache.clear()

        self.engine.call(forget)

    # --- the end -------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.engine.is_open

    def close(self) -> None:
        """Free the models, as `LLM.close` says; any thread may call it."""
        if not self.engine.is_forked:
            self.engine.close()

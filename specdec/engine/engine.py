"""The engine's loop: schedule, propose, verify, accept, for all sequences that share a step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from traceback import clear_frames
from typing import NamedTuple, Protocol

from specdec.engine.engine_thread import EngineThread, ModelClosed
from specdec.engine.request import Request, own_errors
from specdec.engine.scheduler import Batch, Scheduler
from specdec.engine.sequence import Sequence
from specdec.engine.speculation import Speculation, Trees
from specdec.policy.opportunistic_layers import OpportunisticLayers


class Owner(Protocol):
    """Who has sequences run."""

    def begin(self, sequence: Sequence) -> None:
        """Prepare it; in the engine's thread."""

    def note_finished(self, request: Request) -> None:
        """Note the request's figures at its end; in the engine's thread."""


class Running(NamedTuple):
    """A request, its sequences and who wants them."""

    request: Request
    sequences: SequenceOf[Sequence]
    owner: Owner

    def finish(self) -> None:
        """Complete outputs and figures, and let nobody wait any more."""
        try:
            for sequence in self.sequences:
                sequence.finish()
            self.owner.note_finished(self.request)
        finally:
            self.request.finish()


class Engine(EngineThread):
    """Runs the steps of all requests in a thread that owns the models.

    Attributes:
        scheduler, speculation, spare: set by who loads the models, in the thread.
    """

    scheduler: Scheduler | None = None
    speculation: Speculation
    layer_cache: OpportunisticLayers

    def __init__(self) -> None:
        self._running: list[Running] = []
        self._in_pass: SequenceOf[Request] = ()
        """Requests that the running step serves."""
        self._num_cancels = 0
        """Times that a running pass was asked to end."""
        super().__init__()

    def run(self) -> None:
        while not self.is_closing:
            self.drain_inbox(must_wait=not self._running)
            if self._running and not self.is_closing:
                self.run_step()

    def run_step(self) -> None:
        """Run one step, if there is something to do, and finish the requests that are over."""
        assert self.scheduler is not None, "requests are added when the models are loaded"
        self._finish_requests()
        num_cancels, batch = self._num_cancels, Batch()
        try:
            batch = self.scheduler.schedule()
            if batch:
                self.step(batch)
        except BaseException as error:
            self.recover(batch, error, is_cancelled=self._num_cancels > num_cancels)
        self._finish_requests()

    def step(self, batch: Batch) -> None:
        """Run one forward pass of the target; each sequence takes its new tokens.

        Raises an error of the models: nothing of the step counts then (`recover`).
        """
        self._in_pass = batch.requests
        self._make_way(batch)
        self.speculation.draft_prefill(batch)
        trees = self.speculation.propose(batch)
        scores = self.speculation.verify(trees, batch)
        verified = [
            (sequence, sequence.accept(tree, result))
            for (sequence, tree), result in zip(trees, scores, strict=False)
        ]
        for chunk, result in zip(batch.prefill, scores[len(trees) :], strict=True):
            chunk.sequence.sample_first(result)
        self.speculation.observe(verified)
        self._in_pass = ()
        self._pin_layers(batch, trees)

    def recover(self, batch: Batch, error: BaseException, *, is_cancelled: bool) -> None:
        """Let a step that failed end its sequences; others go on.

        is_cancelled: it was cut short for one that nobody wants any more: the others try again.
        Without a batch, which failed while it was made, all requests end.
        """
        _release_frames(error)
        self._in_pass = ()
        everything = [sequence for item in self._running for sequence in item.sequences]
        for sequence in batch.sequences or everything:
            if is_cancelled:
                sequence.try_recover()
            else:
                sequence.request.fail(error)

    def _make_way(self, batch: Batch) -> None:
        """Free memory that holds layers, where prompts are about to need it."""
        if batch.prefill or batch.has_new:  # whose KV may come from a file, but not the draft's
            num_tokens, num_seqs = self._num_cached
            self.layer_cache.make_capacity(num_tokens + batch.num_prefill_tokens, num_seqs)

    def _pin_layers(self, batch: Batch, trees: Trees) -> None:
        """Let memory that is not used hold layers meanwhile."""
        assert self.scheduler is not None, "a step was scheduled"
        num_tokens, num_seqs = self._num_cached
        running = self.scheduler.running
        if batch.prefill:
            more = any(not item.is_decoding for item in running) or bool(self.scheduler.waiting)
            self.layer_cache.begin(num_tokens, num_seqs, more_enter=more)
        else:
            num_lacking = sum(
                item.drafter.n_lacking(item.token_ids) for item in running if item.drafts
            )
            num_scored = sum(len(tree) for _, tree in trees)
            self.layer_cache.pin(num_scored, num_tokens, num_seqs, num_lacking)

    @property
    def _num_cached(self) -> tuple[int, int]:
        """Tokens in the target's KV cache, and sequences that have KV."""
        assert self.scheduler is not None, "a step was scheduled"
        return self.scheduler.kv.cache.n_committed, len(self.scheduler.running)

    def _finish_requests(self) -> None:
        """Free sequences that are over, and finish the requests that have no others."""
        assert self.scheduler is not None, "requests are added when the models are loaded"
        self.scheduler.free_finished()
        is_over = [
            all(sequence.is_finished for sequence in running.sequences) for running in self._running
        ]
        over = [item for item, has_ended in zip(self._running, is_over, strict=True) if has_ended]
        self._running = [item for item in self._running if item not in over]
        for running in over:
            self.scheduler.totals.add(requests=1)
            running.finish()

    def abort(self, error: BaseException | None) -> None:
        for running in self._running:
            if error is not None:
                running.request.fail(error)
            running.request.is_cancelled = True
        if self._running:
            self._finish_requests()

    # --- messages, from any thread -------------------------------------------------------------

    def add(self, request: Request, sequences: SequenceOf[Sequence], owner: Owner) -> None:
        """Let a request take part from the next step on. Raises CalledFromInside."""
        self.check_caller()

        def begin() -> None:
            running = Running(request, sequences, owner)
            if self.is_closing or self.scheduler is None:
                request.fail(ModelClosed())
            if not request.is_aborted:
                with own_errors(request):
                    for sequence in sequences:
                        owner.begin(sequence)
            if request.is_aborted or self.scheduler is None:
                running.finish()
            else:
                self._running.append(running)
                self.scheduler.add(sequences)

        self.send(begin)

    def cancel(self, request: Request) -> None:
        """End it soon, with the pass that runs where that serves nobody else; does not wait.

        A call that comes just before a pass may be lost: whoever waits for the end asks again.
        """
        request.is_cancelled = True

        def end() -> None:
            if all(item.request is not request for item in self._running):
                request.finish()

        self.send(end)
        served = self._in_pass
        if served and all(item is request for item in served):
            self.cancel_pass()

    def cancel_pass(self) -> None:
        self._num_cancels += 1  # first: a pass that it ends knows why
        if self.scheduler is not None:
            self.speculation.request_cancel()


def _release_frames(error: BaseException) -> None:
    """Release the weights that the frames of a failed pass hold: the error may be kept."""
    causes: list[BaseException | None] = [error]
    for cause in causes:
        if cause is not None:
            clear_frames(cause.__traceback__)
            causes += [x for x in (cause.__cause__, cause.__context__) if x not in causes]

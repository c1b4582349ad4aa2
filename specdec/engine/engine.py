"""The engine's loop: schedule, propose, verify, accept, for all sequences that share a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from traceback import clear_frames
from typing import NamedTuple, Protocol

from backends.contract.backend import KvFileError
from specdec.engine.engine_thread import EngineThread, ModelClosed
from specdec.engine.scheduler import Batch, Scheduler
from specdec.engine.sequences.request import Request, own_errors
from specdec.engine.sequences.sequence import Sequence
from specdec.engine.speculation import Speculation, Trees
from specdec.policy.opportunistic_layers import OpportunisticLayers


class Owner(Protocol):
    """Owner of running sequences: prepares them and records their statistics."""

    def before_first(self) -> None:
        """Look after the models before a request while no other runs; called in the engine's
        thread."""

    def prepare(self, sequence: Sequence) -> None:
        """Prepare a sequence; called in the engine's thread."""

    def renew(self, sequence: Sequence) -> None:
        """Prepare a sequence to go on with other models; called in the engine's thread."""

    def note_finished(self, request: Request) -> None:
        """Record the statistics of a finished request; called in the engine's thread."""


class Running(NamedTuple):
    """A running request, its sequences and their owner."""

    request: Request
    sequences: SequenceOf[Sequence]
    owner: Owner

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def finish(self) -> None:
        """Complete outputs and statistics, and wake whoever waits for the request."""
        with own_errors(self.request):
            for sequence in self.sequences:
                sequence.finish()
            self.owner.note_finished(self.request)
        self.request.finish()


class Engine(EngineThread):
    """Main loop over the steps of all requests, in a thread that owns the models.

    Attributes:
        scheduler, speculation, opportunistic_layers: set once the models are loaded, in this
            thread.
    """

    scheduler: Scheduler | None = None
    speculation: Speculation
    opportunistic_layers: OpportunisticLayers

    def __init__(self) -> None:
        self._running: list[Running] = []
        self._in_pass: SequenceOf[Request] = ()
        """Requests of the current step."""
        self.save_prefixes: Callable[[], None] = lambda: None
        """Write the KV of newly finished sequences to storage, where that is requested."""
        self.after_step: Callable[[], None] = lambda: None
        """Look after the process between two steps."""
        self._num_cancels = 0
        """Number of calls of `cancel_pass` so far."""
        super().__init__()

    def run(self) -> None:
        while not self.is_closing:
            self.drain_inbox(must_wait=not self._running)
            if self._running and not self.is_closing:
                self.run_step()
                self.after_step()

    def run_step(self) -> None:
        """Run one step if any sequence can be scheduled, and finish requests that have ended."""
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
        """Run one forward pass of the target, and append the new tokens to each sequence.

        Raises errors of the models; the step is then undone by `recover`.
        """
        assert self.scheduler is not None, "a step was scheduled"
        self._in_pass = batch.requests
        self._release_layers(batch)
        self.speculation.draft_prefill(batch)
        trees = self.speculation.propose(batch)
        began = time.perf_counter()
        outputs = self.speculation.forward(trees, batch)
        if not trees:
            seconds = time.perf_counter() - began
            num_tokens = batch.num_prefill_tokens
            self.scheduler.observe_prefill(num_tokens, seconds, outputs.stall_seconds)
        verified = [
            (sequence, sequence.accept(tree, output))
            for (sequence, tree), output in zip(trees, outputs.trees, strict=True)
        ]
        for chunk, output in zip(batch.prefill, outputs.prefill, strict=True):
            chunk.sequence.note_progress()  # before the first token
            chunk.sequence.end_prefill(output)
        self.speculation.observe(verified, outputs.stall_seconds)
        self._in_pass = ()
        self._pin_layers(batch, trees)

    def recover(self, batch: Batch, error: BaseException, *, is_cancelled: bool) -> None:
        """Fail the requests of a step that raised; other requests go on.

        is_cancelled: the step was cut short for a cancelled request, and the others try again. All
        try again where the KV file failed and cached KV could be dropped for them.
        An empty batch means that scheduling itself failed: all requests fail.
        """
        _release_frames(error)
        self._in_pass = ()
        is_repeated = is_cancelled
        if isinstance(error, KvFileError) and self.scheduler is not None:
            is_repeated |= self.scheduler.kv.drop_cached() and bool(batch)
        all_sequences = [sequence for running in self._running for sequence in running.sequences]
        for sequence in batch.sequences or all_sequences:
            if is_repeated or _spares(error, sequence):
                sequence.try_recover()
            else:
                sequence.request.fail(error)

    def _release_layers(self, batch: Batch) -> None:
        """Free opportunistic layers whose memory the batch's prompts need."""
        # KV that was swapped in is the target's; the draft computes its own, which takes memory.
        if batch.prefill or batch.has_scheduled_new:
            num_tokens, num_seqs = self._num_cached
            self.opportunistic_layers.release_for_prefill(
                num_tokens + batch.num_prefill_tokens, num_seqs
            )

    def _pin_layers(self, batch: Batch, trees: Trees) -> None:
        """Pin layers in memory that the KV cache and activations do not use at the moment."""
        assert self.scheduler is not None, "a step was scheduled"
        num_tokens, num_seqs = self._num_cached
        running = self.scheduler.running
        if not self.scheduler.waiting:
            self.opportunistic_layers.release_kv()
        if batch.prefill:
            more = any(not seq.is_decoding for seq in running) or bool(self.scheduler.waiting)
            self.opportunistic_layers.pin_after_prefill(num_tokens, num_seqs, has_more_prefill=more)
        else:
            num_uncomputed = sum(
                seq.drafting.num_uncomputed(seq.token_ids)
                for seq in running
                if seq.drafting is not None
            )
            num_scored = sum(len(tree) for _, tree in trees)
            self.opportunistic_layers.pin_after_decode(
                num_scored, num_tokens, num_seqs, num_uncomputed
            )

    @property
    def _num_cached(self) -> tuple[int, int]:
        """Number of tokens in the target's KV cache, and of sequences that have KV."""
        assert self.scheduler is not None, "a step was scheduled"
        return self.scheduler.kv.cache.n_committed, len(self.scheduler.running)

    def _finish_requests(self) -> None:
        """Free finished sequences, and finish requests whose sequences have all finished."""
        assert self.scheduler is not None, "requests are added when the models are loaded"
        self.scheduler.free_finished()
        finished = [running for running in self._running if running.is_finished]
        self._running = [running for running in self._running if running not in finished]
        for running in finished:
            self.scheduler.totals.add(requests=1)
            running.finish()
        self.save_prefixes()  # when callers have their answers

    def abort(self, error: BaseException | None) -> None:
        for running in self._running:
            if error is not None:
                running.request.fail(error)
            else:
                running.request.is_cancelled = True
        if self._running:
            self._finish_requests()

    # --- other models, between steps ------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """The running requests."""
        return [running.request for running in self._running]

    def suspend(self) -> None:
        """Let all sequences wait without KV, before the models are closed."""
        assert self.scheduler is not None, "the models are loaded"
        self.save_prefixes()
        self.scheduler.preempt_all()

    def resume(self) -> None:
        """Let the sequences go on with other models, as they were before."""
        for running in self._running:
            running.request.is_replanned = True
            with own_errors(running.request):
                for sequence in running.sequences:
                    running.owner.renew(sequence)

    # --- messages, from any thread -------------------------------------------------------------

    def add(self, request: Request, sequences: SequenceOf[Sequence], owner: Owner) -> None:
        """Add a request to the next step's candidates. Raises CalledFromInside."""
        self.check_caller()

        def begin() -> None:
            running = Running(request, sequences, owner)
            if not self._running and not request.is_aborted and not self.is_closing:
                owner.before_first()
            if self.is_closing or self.scheduler is None:
                request.fail(ModelClosed())
            if not request.is_aborted:
                with own_errors(request):
                    for sequence in sequences:
                        owner.prepare(sequence)
            if request.is_aborted or self.scheduler is None:
                running.finish()
            else:
                self._running.append(running)
                self.scheduler.add(sequences)

        self.send(begin)

    def cancel(self, request: Request) -> None:
        """Cancel a request without waiting; also a running pass that serves only cancelled ones.

        A call just before a pass may miss it: whoever waits for the end calls again.
        """
        request.is_cancelled = True

        def end() -> None:
            if all(item.request is not request for item in self._running):
                request.finish()

        self.send(end)
        served = self._in_pass
        if served and all(item.is_aborted for item in served):
            self.cancel_pass()

    def cancel_pass(self) -> None:
        self._num_cancels += 1  # first, so that `run_step` sees why its pass ended
        if self.scheduler is not None:
            self.speculation.request_cancel()


def _spares(error: BaseException, sequence: Sequence) -> bool:
    """Return whether a failed pass concerns the KV of other sequences alone."""
    if not isinstance(error, KvFileError) or not error.stores or sequence.kv is None:
        return False
    return getattr(sequence.kv, "store", None) not in error.stores


def _release_frames(error: BaseException) -> None:
    """Clear the frames of a failed pass, so that a stored error does not keep weights alive."""
    causes: list[BaseException | None] = [error]
    for cause in causes:
        if cause is not None:
            clear_frames(cause.__traceback__)
            causes += [x for x in (cause.__cause__, cause.__context__) if x not in causes]

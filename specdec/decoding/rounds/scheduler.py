"""Which texts take part in the next round: requests enter and leave between passes.

    waiting ──admitted──> entering ──prompt computed──> decoding ──> over
       ^                      │                            │
       └───── set aside, where the KV cache is full ───────┘

Continuous batching as in Orca (Yu et al. 2022): whoever is ready shares the next pass. Long prompts
enter in chunks beside the others' decoding (Sarathi, Agrawal et al. 2023), so that nobody who reads
along waits for them much longer than for a pass. Where the KV cache has no room for all, the text
that came last is set aside and comes back later, its KV read from a file or computed anew (see
Room): the text goes on as if nothing had been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from traceback import clear_frames

from backends.contract.sequence import SequenceRows
from specdec.decoding.rounds.controller import Controller, Entering
from specdec.decoding.rounds.jobs import Job, SearchJob, TextJob
from specdec.decoding.rounds.recorder import Totals
from specdec.decoding.rounds.room import Room, its_own_errors, rank
from specdec.policy.costs import MOST_TIMED_ROWS, PassCost
from specdec.policy.spare_memory import SpareMemory

LONGEST_PASS = 1.5
"""Times as long as else a pass may take for a prompt that enters beside others' decoding ..."""
UNNOTICED_SECONDS = 0.25
"""... or so long: of a model in memory, whose pass takes a few hundredths of a second, nobody sees
that, and a long prompt would take hundreds of passes."""


class Scheduler:
    """Runs rounds of all jobs, in the engine's thread.

    Args:
        room: who has KV.
        cost: of a pass, as planned.
        max_texts: in one pass.
        max_entering: tokens of prompts in one pass.
    """

    def __init__(
        self,
        controller: Controller,
        room: Room,
        spare: SpareMemory,
        cost: PassCost,
        *,
        max_texts: int,
        max_entering: int,
    ) -> None:
        self._controller, self._spare = controller, spare
        self.room = room
        self._cost = cost
        self._max_texts, self._max_entering = max_texts, max_entering
        self._arrived: deque[Job] = deque()
        self._numbers = count()
        self.in_pass: tuple[Job, ...] = ()
        """Whom the pass that runs serves."""
        self._n_cancels = 0
        """Times that a running pass was asked to end."""

    def add(self, job: Job) -> None:
        """Let it take part from the next round on."""
        self._arrived.append(job)

    @property
    def n_running(self) -> int:
        """Texts and searches that have KV; any thread may ask, as of those that wait."""
        return len(self.room.running) + (self.room.search_begun is not None)

    @property
    def n_waiting(self) -> int:
        room = self.room
        n_searches = len(room.searches) - (room.search_begun is not None)
        return len(room.waiting) + len(self._arrived) + n_searches

    def _welcome(self) -> None:
        while self._arrived:
            job = self._arrived.popleft()
            job.number = next(self._numbers)
            if isinstance(job, TextJob):
                self.room.waiting.append(job)
            else:
                assert isinstance(job, SearchJob)
                self.room.searches.append(job)

    @property
    def totals(self) -> Totals:
        return self._controller.totals

    def cancel_pass(self) -> None:
        """End a running pass soon; any thread may call it."""
        self._n_cancels += 1  # first: a pass that it ends knows why
        self._controller.request_cancel()

    def round(self) -> None:
        """One pass for the texts that are ready, or for a search if that is its turn.

        An error of the models ends those that took part in the pass.
        """
        self.dismiss()
        try:
            if not self._search():
                self._share_a_pass()
        finally:
            self.in_pass = ()
            self.dismiss()

    def dismiss(self) -> None:
        """Let go of those that are over."""
        self._welcome()
        self.room.dismiss()

    # --- a pass of texts -----------------------------------------------------------------------

    def _share_a_pass(self) -> None:
        n_running = len(self.room.running)
        self.room.admit()
        has_new = len(self.room.running) > n_running
        running = sorted(self.room.running, key=rank)[: self._max_texts]
        self.room.make_room(running, self._controller.max_rows)
        jobs = [job for job in running if job.decoder.text is not None]
        decoding = self._with_nodes([job for job in jobs if job.decoder.is_decoding])
        others = [job for job in jobs if not job.decoder.is_decoding]
        most_rows = self._most_rows(decoding) if others and decoding else None
        entering = self._chunks(others, most_rows, len(decoding))
        n_entering = sum(len(rows.token_ids) for _, rows in entering)
        if entering or has_new:  # whose KV may come from a file, but not the draft's
            self._spare.make_room(self.room.texts.n_committed + n_entering, len(self.room.running))
        if not self._step(decoding, entering, most_rows):
            return
        rounds = [job.decoder.round for job in decoding]
        n_rows = n_entering + sum(len(one.tree) for one in rounds if one is not None)
        self._lend(n_rows, has_entered=bool(entering))

    def _with_nodes(self, decoding: Sequence[TextJob]) -> Sequence[TextJob]:
        """Those that a node each is left for: beams may hold nearly all of them until they end."""
        if self.room.search_begun is None:
            return decoding
        return decoding[: decoding[0].decoder.sequence.node_room] if decoding else decoding

    def _step(
        self,
        decoding: Sequence[TextJob],
        entering: Sequence[tuple[TextJob, SequenceRows]],
        most_rows: int | None,
    ) -> bool:
        """One pass, and what it brought is taken; False where it broke off."""
        taking_part = [*decoding, *(job for job, _ in entering)]
        n_cancels, self.in_pass = self._n_cancels, tuple(taking_part)
        chunks: list[Entering] = [(job.decoder, rows) for job, rows in entering]
        try:
            self._controller.step([job.decoder for job in decoding], chunks, most_rows)
        except BaseException as error:
            _let_go(error)
            for job in taking_part:
                if self._n_cancels > n_cancels:  # for one that is cancelled: others try again
                    with its_own_errors(job):
                        job.decoder.recover()
                else:
                    job.error = error
            return False
        for job in taking_part:
            job.error = job.decoder.error
            if job.error is None and job.decoder.news:
                with its_own_errors(job):
                    job.take()
        return True

    def _lend(self, n_rows: int, has_entered: bool) -> None:
        """Memory that is not used holds layers meanwhile."""
        room = self.room
        n_tokens, n_texts = room.texts.n_committed, len(room.running)
        if has_entered:
            is_entering = any(not job.decoder.is_decoding for job in room.running)
            self._spare.begin(n_tokens, n_texts, more_enter=is_entering or bool(room.waiting))
        else:
            decoders = [job.decoder for job in room.running]
            n_lacking = sum(one.drafter.n_lacking(one.context) for one in decoders)
            self._spare.lend(n_rows, n_tokens, n_texts, n_lacking)

    def _chunks(
        self, jobs: Sequence[TextJob], most_rows: int | None, n_decoding: int
    ) -> list[tuple[TextJob, SequenceRows]]:
        """What enters beside a row of each text that decodes, first come first served."""
        n_left, found = self._max_entering, []
        if most_rows is not None:
            n_left = min(n_left, most_rows - n_decoding)
        for job in jobs:
            if n_left < 1:
                break
            rows = job.decoder.entering_rows(n_left)
            n_left -= len(rows.token_ids)
            found.append((job, rows))
        return found

    def _most_rows(self, decoding: Sequence[TextJob]) -> int:
        """Of a pass in which prompts enter beside these texts, draft tokens included: the prompt
        comes first, for its rows and those of drafts cost the others the same. One row more there
        is in any case: it has to get in some day."""
        cost, n_rows = self._cost, len(decoding)
        if not any(job.is_streamed for job in decoding):
            return max(n_rows + 1, min(self._max_entering, MOST_TIMED_ROWS))
        seconds = max(LONGEST_PASS * cost.seconds(n_rows), UNNOTICED_SECONDS)
        n_most = (seconds - cost.row_free_seconds) / cost.seconds_per_row
        return max(n_rows + 1, int(n_most + 1e-6))

    # --- searches ------------------------------------------------------------------------------

    def _search(self) -> bool:
        """A pass of the search that is first in rank; whether there are no texts beside it."""
        room = self.room
        search = room.search_begun or min(room.searches, key=rank, default=None)
        if search is None:
            return False
        self._spare.give_back()
        n_cancels, self.in_pass = self._n_cancels, (search,)
        try:
            if search.text is None:
                search.begin(room.text_of(search))
            room.make_room_for(search)
            decoding = [job for job in room.running if job.decoder.is_decoding]
            search.run(self._most_rows(decoding) if decoding else None)
        except BaseException as error:
            _let_go(error)
            if self._n_cancels == n_cancels:
                search.error = error
            elif (
                search.text is not None
            ):  # for one that is over: its beams are gone, it begins anew
                room.texts.drop(search.text)
                search.text = None
        return not (room.waiting or room.running)


def _let_go(error: BaseException) -> None:
    """Of the weights of a pass that failed: its frames hold them, and whoever was told may keep the
    error."""
    causes: list[BaseException | None] = [error]
    for one in causes:
        if one is not None:
            clear_frames(one.__traceback__)
            causes += [x for x in (one.__cause__, one.__context__) if x not in causes]

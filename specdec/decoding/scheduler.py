"""Which texts take part in the next round: requests enter and leave between passes.

    waiting ──admitted──> entering ──prompt computed──> decoding ──> over
       ^                      │                            │
       └───── set aside, where the KV cache is full ───────┘

Continuous batching as in Orca (Yu et al. 2022): whoever is ready shares the next pass. Long prompts
enter in chunks beside the others' decoding (Sarathi, Agrawal et al. 2023), so that nobody waits for
them much longer than for a pass. Where the KV cache has no room for all, the text that came last is
set aside and comes back later, its KV computed anew (vLLM's recomputation, Kwon et al. 2023): the
text goes on as if nothing had been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from backends.contract.backend import Backend
from backends.contract.kept_texts import KeptTexts
from backends.contract.sequence import SequenceRows, TokenSequence, common_length
from specdec.decoding.controller import Controller, Entering
from specdec.decoding.jobs import Job, SearchJob, TextJob
from specdec.decoding.spare_memory import SpareMemory
from specdec.policy.costs import PassCost

LONGEST_PASS = 1.5
"""Times as long as else a pass may take for a prompt that enters beside others' decoding ..."""
UNNOTICED_SECONDS = 0.25
"""... or so long: of a model in memory, whose pass takes a few hundredths of a second, nobody sees
that, and a long prompt would take hundreds of passes."""
_WORTH_WAITING = 16
"""Tokens that a prompt begins with, for it to wait for another one that is computing them."""
_ROOM_TO_GROW = 64
"""Tokens, a block of the KV cache, that have to be free for each text before another one comes."""


class Scheduler:
    """Runs rounds of all jobs; one thread at a time may use it.

    Args:
        texts: the target's KV.
        cost: of a pass, as planned.
        max_texts: in one pass.
        max_entering: tokens of prompts in one pass.
    """

    def __init__(
        self,
        controller: Controller,
        target: Backend,
        texts: KeptTexts,
        spare: SpareMemory,
        cost: PassCost,
        *,
        max_texts: int,
        max_entering: int,
    ) -> None:
        self._controller, self._target, self._spare = controller, target, spare
        self.texts = texts
        self._cost = cost
        self._max_texts, self._max_entering = max_texts, max_entering
        self._arrived: deque[Job] = deque()  # any thread adds to it
        self._waiting: list[TextJob] = []
        self._running: list[TextJob] = []  # those that have KV
        self._searches: list[SearchJob] = []
        self._numbers = count()
        self.in_pass: tuple[Job, ...] = ()
        """Whom the pass that runs serves."""
        self.n_cancels = 0
        """Times that a running pass was asked to end; counted by who asks."""

    def add(self, job: Job) -> None:
        """Let it take part from the next round on; any thread may call it."""
        self._arrived.append(job)

    @property
    def n_running(self) -> int:
        """Texts and searches that have KV; any thread may ask, as of those that wait."""
        return len(self._running) + (self._search_begun is not None)

    @property
    def n_waiting(self) -> int:
        n_searches = len(self._searches) - (self._search_begun is not None)
        return len(self._waiting) + len(self._arrived) + n_searches

    def _welcome(self) -> None:
        while self._arrived:
            job = self._arrived.popleft()
            job.number = next(self._numbers)
            if isinstance(job, TextJob):
                self._waiting.append(job)
            else:
                assert isinstance(job, SearchJob)
                self._searches.append(job)

    def round(self) -> None:
        """One pass for those who are waited for, or for a search if that is its turn.

        An error of the models ends those that took part in the pass; what is no Exception (Ctrl-C)
        leaves them as they were before, and is raised. Not to be cut elsewhere (`uninterrupted`).
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
        for job in [job for job in self._running if job.is_over]:
            self._running.remove(job)
            self.texts.end(job.decoder.sequence)
            _let_go(job)
        for search in [search for search in self._searches if search.is_over]:
            self._searches.remove(search)
            with _its_own_errors(search):
                search.end()
            if search.text is not None:
                self.texts.end(search.text)
                search.text = None
        self._waiting = [job for job in self._waiting if not job.is_over]

    # --- a pass of texts -----------------------------------------------------------------------

    def _share_a_pass(self) -> None:
        self._admit()
        wanted = [job for job in sorted(self._running, key=_rank) if job.is_wanted]
        wanted = wanted[: self._max_texts]
        self._make_room(wanted)
        jobs = [job for job in wanted if job.decoder.text is not None]
        decoding = [job for job in jobs if job.decoder.is_decoding]
        others = [job for job in jobs if not job.decoder.is_decoding]
        most_rows = self._most_rows(len(decoding)) if others and decoding else None
        entering = self._chunks(others, most_rows, len(decoding))
        n_entering = sum(len(rows.token_ids) for _, rows in entering)
        if entering:
            self._spare.make_room(self.texts.n_committed + n_entering)
        if not self._step(decoding, entering, most_rows):
            return
        rounds = [job.decoder.round for job in decoding]
        n_rows = n_entering + sum(len(one.tree) for one in rounds if one is not None)
        self._lend(n_rows, has_entered=bool(entering))

    def _step(
        self,
        decoding: Sequence[TextJob],
        entering: Sequence[tuple[TextJob, SequenceRows]],
        most_rows: int | None,
    ) -> bool:
        """One pass, and what it brought is taken; False where it broke off."""
        taking_part = [*decoding, *(job for job, _ in entering)]
        n_cancels, self.in_pass = self.n_cancels, tuple(taking_part)
        chunks: list[Entering] = [(job.decoder, rows) for job, rows in entering]
        try:
            self._controller.step([job.decoder for job in decoding], chunks, most_rows)
        except BaseException as error:
            is_cut = self.n_cancels > n_cancels or not isinstance(error, Exception)
            for job in taking_part:
                if is_cut:  # by Ctrl-C, or for one that is cancelled: the others try again
                    with _its_own_errors(job):
                        job.decoder.recover()
                else:
                    job.error = error
            if not isinstance(error, Exception):
                raise
            return False
        for job in taking_part:
            job.error = job.decoder.error
            if job.error is None and job.decoder.news:
                with _its_own_errors(job):
                    job.take()
        return True

    def _lend(self, n_rows: int, has_entered: bool) -> None:
        """Memory that is not used holds layers meanwhile."""
        if has_entered:
            self._spare.begin()
        else:
            self._spare.lend(n_rows, self.texts.n_committed)

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

    def _most_rows(self, n_rows: int) -> int:
        """Of a pass in which prompts enter beside so many rows, draft tokens included: the prompt
        comes first, for its rows and those of drafts cost the others the same. One row more there
        is in any case: it has to get in some day."""
        cost = self._cost
        seconds = max(LONGEST_PASS * cost.seconds(n_rows), UNNOTICED_SECONDS)
        n_most = (seconds - cost.row_free_seconds) / cost.seconds_per_row
        return max(n_rows + 1, int(n_most + 1e-6))

    # --- room ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let those in for whom there is room, in the order of their ranks."""
        for job in sorted(self._waiting, key=_rank):
            if not job.is_wanted:
                continue
            if self._waits_for_another(job) or not self._let_in(job):
                return
            self._waiting.remove(job)
            self._running.append(job)

    def _let_in(self, job: TextJob) -> bool:
        while len(self._running) >= self._max_texts:
            if not self._set_aside_unwanted():
                return False
        while True:
            text = self.texts.begin(job.decoder.wanted_ids, is_fresh=job.is_fresh)
            if self._has_room(job, len(job.decoder.wanted_ids) - text.n_committed, text):
                job.decoder.begin(text)
                return True
            self.texts.drop(text)
            if not (self.texts.drop_oldest() or self._set_aside_unwanted()):
                return False

    def _has_room(self, job: TextJob, n_tokens: int, text: TokenSequence) -> bool:
        """For it, and for the others to grow. Alone it is let in: more room there will never be."""
        if not self._running and self._search_begun is None:
            return True
        batch = [_room(text, n_tokens + _ROOM_TO_GROW)]
        if self._search_begun is not None:
            batch.append(self._search_begun.rows)
        batch += [_room(other.decoder.sequence, _ROOM_TO_GROW) for other in self._running]
        return self._target.n_fitting(batch) == len(batch)

    def _waits_for_another(self, job: TextJob) -> bool:
        """Whether another one is computing what it begins with, too."""
        wanted = job.decoder.wanted_ids[:-1]
        for other in self._running:
            decoder = other.decoder
            if job.is_fresh or decoder.is_decoding or not other.is_wanted:
                continue
            n_common = common_length(decoder.context, wanted)
            if n_common - decoder.sequence.n_committed >= _WORTH_WAITING:
                return True
        return False

    def _make_room(self, jobs: Sequence[TextJob]) -> None:
        """So that each of them can take part with at least one row; set others aside for that."""
        jobs = list(jobs)
        n_nodes = self._controller.max_rows // max(1, len(jobs))
        for job in jobs:
            self.texts.make_room(job.decoder.sequence, max(n_nodes, job.decoder.n_entering))
        while True:
            batch = [_room(one.decoder.sequence, max(1, one.decoder.n_entering)) for one in jobs]
            if self._target.n_fitting(batch) == len(batch):
                return
            if self._set_aside_unwanted():
                continue
            if len(jobs) < 2 and self._search_begun is None:
                return  # more room there will never be: the pass says what is full
            self._set_aside(jobs.pop())  # the last one in rank

    def _set_aside_unwanted(self) -> bool:
        unwanted = [job for job in self._running if not job.is_wanted]
        if unwanted:
            self._set_aside(max(unwanted, key=_rank))
        return bool(unwanted)

    def _set_aside(self, job: TextJob) -> None:
        self._controller.totals.add(set_aside=1)
        self._running.remove(job)
        self._waiting.append(job)
        self.texts.drop(job.decoder.sequence)
        _let_go(job)

    # --- searches ------------------------------------------------------------------------------

    @property
    def _search_begun(self) -> SearchJob | None:
        """The one that has KV: room for beams is that of one search."""
        return next((search for search in self._searches if search.text is not None), None)

    def _search(self) -> bool:
        """A pass of the search that came first; whether texts wait for no other one beside it."""
        search = self._search_begun or next((one for one in self._searches if one.is_wanted), None)
        if search is None:
            return False
        self._spare.give_back()
        self.in_pass = (search,)
        try:
            if search.text is None:
                search.begin(self.texts.begin(search.prompt_ids, is_fresh=search.is_fresh))
            self._make_room_for(search)
            search.run()
        except Exception as error:
            search.error = error
        except BaseException:  # Ctrl-C of who runs the round: its beams are gone
            if search.text is not None:
                self.texts.drop(search.text)
                search.text = None
            raise
        return not any(job.is_wanted for job in (*self._waiting, *self._running))

    def _make_room_for(self, search: SearchJob) -> None:
        """Its beams cannot come back as a text does: texts are set aside for them."""
        while self._target.n_fitting([search.rows]) < 1:
            if not (self.texts.drop_oldest() or self._set_aside_unwanted()):
                if not self._running:
                    return  # more room there will never be: the pass says what is full
                self._set_aside(max(self._running, key=_rank))


def _rank(job: Job) -> tuple[int, int]:
    return job.rank


def _room(text: TokenSequence, n_rows: int) -> SequenceRows:
    """So many rows, to ask for the room that they take."""
    return SequenceRows(text, [0] * n_rows)


def _let_go(job: TextJob) -> None:
    """Of what it computes with: its KV is another one's."""
    job.decoder.text = None
    with _its_own_errors(job):
        job.decoder.drafter.reset()


@contextmanager
def _its_own_errors(job: Job) -> Iterator[None]:
    """What fails in here ends this job, and no other one: a drafter may be the caller's own."""
    try:
        yield
    except Exception as error:
        job.error = job.error or error

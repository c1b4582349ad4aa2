"""Which texts have KV: those that run. The others wait, and some of them were set aside.

First come first served, by priorities. Where the KV cache has no room for all, the text that came
last is set aside: its KV goes to a file and is read again when it comes back. It is computed anew
where that is quicker, or where no file can be written (vLLM's recomputation, Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from backends.contract.backend import Backend, BackendError
from backends.contract.kept_texts import KeptTexts
from backends.contract.kv_files import KvFiles
from backends.contract.sequence import SequenceRows, TokenSequence, common_length
from specdec.decoding.rounds.jobs import Job, SearchJob, TextJob
from specdec.decoding.rounds.recorder import Totals
from specdec.policy.costs import PassCost

FILE_SECONDS = 0.01
"""Of writing a file and reading it again, however short it is, and ..."""
FILE_BYTES_PER_SECOND = 200e6
"""... of each way: a slow disk's. On a faster one a file pays for fewer tokens than it is used for,
and those are few: 15 of a 3B in bf16, whose rows take 60 ms."""
_OWN_SHARE = 0.5
"""Of a text's tokens, that no other one holds, for a file to be worth it: what others hold is
shared with them, and what a file brings takes room of its own."""
_WORTH_WAITING = 16
"""Tokens that a prompt begins with, for it to wait for another one that is computing them."""
_ROOM_TO_GROW = 64
"""Tokens, a block of the KV cache, that have to be free for each text before another one comes."""


class Room:
    """Lets jobs in and sets them aside.

    Args:
        texts: the target's KV.
        cost: of a pass, as planned.
        max_texts: that run.

    Attributes:
        running: texts that have KV; waiting: those that have not.
        searches: all of them; one has KV at a time.
    """

    def __init__(
        self,
        target: Backend,
        texts: KeptTexts,
        files: KvFiles,
        cost: PassCost,
        totals: Totals,
        max_texts: int,
    ) -> None:
        self.texts, self.files = texts, files
        self._target, self._cost, self._totals = target, cost, totals
        self._max_texts = max_texts
        self.waiting: list[TextJob] = []
        self.running: list[TextJob] = []
        self.searches: list[SearchJob] = []

    @property
    def search_begun(self) -> SearchJob | None:
        """The one that has KV: room for beams is that of one search."""
        return next((search for search in self.searches if search.text is not None), None)

    def dismiss(self) -> None:
        """Let go of those that are over."""
        for job in [job for job in self.running if job.is_over]:
            self.running.remove(job)
            self.texts.end(job.decoder.sequence)
            _let_go(job)
        for search in [search for search in self.searches if search.is_over]:
            self.searches.remove(search)
            with its_own_errors(search):
                search.end()
            if search.text is not None:
                self.texts.end(search.text)
                search.text = None
        for job in [job for job in self.waiting if job.is_over]:
            self.waiting.remove(job)
            _close_file(job)

    # --- in ------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let those in for whom there is room, in the order of their ranks."""
        for job in sorted(self.waiting, key=rank):
            if not job.is_ready:
                continue
            if self._waits_for_another(job) or not self._let_in(job):
                return
            self.waiting.remove(job)
            self.running.append(job)

    def _let_in(self, job: TextJob) -> bool:
        if len(self.running) >= self._max_texts:
            return False
        while not (self._restore(job) if self._is_file_worth_it(job) else self._begin(job)):
            if not self.texts.drop_oldest():
                return False
        _close_file(job)
        return True

    def _begin(self, job: TextJob) -> bool:
        """With as much of its KV as is in memory, if there is room for the rest."""
        wanted = job.decoder.wanted_ids
        text = self._new_text(wanted, job.is_fresh)
        if text is None:
            return False
        if self._has_room(len(wanted) - text.n_committed, text):
            job.decoder.begin(text)
            return True
        self.texts.drop(text)
        return False

    def _restore(self, job: TextJob) -> bool:
        """With the KV that its file has, if there is room."""
        wanted, file = job.decoder.wanted_ids, job.kv_file
        assert file is not None, "whoever has none begins"
        text = self._new_text(wanted, is_fresh=True)
        if text is None:
            return False
        has_room = self._has_room(len(wanted), text)
        if has_room:  # it may be alone: what is kept goes then
            self.texts.make_room(text, len(wanted))
        n_growth = self._target.kv_growth_bytes(self.texts.n_committed + len(wanted))
        if has_room and file.load(text, n_growth):
            self._totals.add(restored=1, restored_tokens=text.n_committed)
            job.decoder.begin(text, is_restored=True)
            return True
        self.texts.drop(text)
        if not has_room:
            return False
        _close_file(job)  # it cannot be read
        return self._begin(job)

    def _new_text(self, token_ids: Sequence[int], is_fresh: bool) -> TokenSequence | None:
        """None where the backend has no room for one more beside those that run."""
        try:
            return self.texts.begin(token_ids, is_fresh=is_fresh)
        except BackendError:
            if self.running or self.search_begun is not None:
                return None
            raise

    def _has_room(self, n_tokens: int, text: TokenSequence) -> bool:
        """For it, and for the others to grow. Alone it is let in: more room there will never be."""
        search = self.search_begun
        if not self.running and search is None:
            return True
        batch = [_rows(text, n_tokens + _ROOM_TO_GROW)]
        if search is not None:
            batch.append(search.rows)
        for other in self.running:
            decoder = other.decoder
            batch.append(_rows(decoder.sequence, decoder.n_entering + _ROOM_TO_GROW))
        return self._target.n_fitting(batch) == len(batch)

    def _waits_for_another(self, job: TextJob) -> bool:
        """Whether another one is computing what it begins with, too."""
        wanted = job.decoder.wanted_ids[:-1]
        for other in self.running:
            decoder = other.decoder
            if job.is_fresh or decoder.is_decoding:
                continue
            n_common = common_length(decoder.context, wanted)
            if n_common - decoder.sequence.n_committed >= _WORTH_WAITING:
                return True
        return False

    # --- out -----------------------------------------------------------------------------------

    def make_room(self, jobs: Sequence[TextJob], max_rows: int) -> None:
        """So that each of them can take part with at least one row; set others aside for that."""
        jobs = list(jobs)
        n_nodes = max_rows // max(1, len(jobs))
        for job in jobs:
            self.texts.make_room(job.decoder.sequence, max(n_nodes, job.decoder.n_entering))
        while True:
            batch = [_rows(one.decoder.sequence, max(1, one.decoder.n_entering)) for one in jobs]
            if self._target.n_fitting(batch) == len(batch):
                return
            if self.texts.drop_oldest():
                continue
            if len(jobs) < 2 and self.search_begun is None:
                return  # more room there will never be: the pass says what is full
            self._set_aside(jobs.pop())  # the last one in rank

    def text_of(self, search: SearchJob) -> TokenSequence:
        """For one that begins; texts are set aside where the backend has no room for one more."""
        while (text := self._new_text(search.prompt_ids, search.is_fresh)) is None:
            self._set_aside(max(self.running, key=rank))
        return text

    def make_room_for(self, search: SearchJob) -> None:
        """Its beams cannot come back as a text does: texts are set aside for them."""
        while self._target.n_fitting([search.rows]) < 1:
            if not self.texts.drop_oldest():
                if not self.running:
                    return  # more room there will never be: the pass says what is full
                self._set_aside(max(self.running, key=rank))

    def _set_aside(self, job: TextJob) -> None:
        self._totals.add(set_aside=1)
        self.running.remove(job)
        self.waiting.append(job)
        text = job.decoder.sequence
        n_bytes = text.n_committed * self._target.kv_bytes // max(1, self._target.n_kv_allocated)
        if self._is_worth_it(text.n_committed, self._n_shared(job, text), n_bytes):
            job.kv_file = self.files.write(text)
        self.texts.drop(text)
        _let_go(job)

    # --- files ---------------------------------------------------------------------------------

    def _is_file_worth_it(self, job: TextJob) -> bool:
        file = job.kv_file
        if file is None:
            return False
        return self._is_worth_it(len(file.token_ids), self._n_shared(job), file.n_bytes)

    def _n_shared(self, job: TextJob, text: TokenSequence | None = None) -> int:
        """Tokens whose KV others hold; text: its own."""
        return 0 if job.is_fresh else self.texts.n_common(job.decoder.wanted_ids, text)

    def _is_worth_it(self, n_tokens: int, n_shared: int, n_bytes: int) -> bool:
        """Whether a file of so many tokens is quicker than the passes' rows that it saves."""
        n_own = n_tokens - n_shared
        if n_own < _OWN_SHARE * n_tokens:
            return False
        seconds = self._cost.seconds(1 + n_own) - self._cost.seconds(1)
        return seconds > FILE_SECONDS + 2 * n_bytes / FILE_BYTES_PER_SECOND


def rank(job: Job) -> tuple[int, int]:
    return job.rank


def _rows(text: TokenSequence, n_rows: int) -> SequenceRows:
    """So many rows, to ask for the room that they take."""
    return SequenceRows(text, [0] * n_rows)


def _let_go(job: TextJob) -> None:
    """Of what it computes with: its KV is another one's."""
    job.decoder.text = None
    with its_own_errors(job):
        job.decoder.drafter.reset()


def _close_file(job: TextJob) -> None:
    file, job.kv_file = job.kv_file, None
    if file is not None:
        file.close()


@contextmanager
def its_own_errors(job: Job) -> Iterator[None]:
    """What fails in here ends this job, and no other one: a drafter may be the caller's own."""
    try:
        yield
    except Exception as error:
        job.error = job.error or error

"""The target as teacher: its distributions along given sequences, written as traces.

Each pass computes as many tokens as there is memory for their logits, so a target that streams is
read once for hundreds or a thousand of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.contract.sequence import SequenceInput, SequenceKV, SequenceOutput
from offload.budget import BudgetExceeded
from specdec.api import LLM
from specdec.run_options import OFF, RunOptions
from specdec.traces.format import (
    DEFAULT_TOP_K,
    INDEX,
    TracedSequence,
    TraceHeader,
    read_index,
)
from specdec.traces.top_k import TopK
from specdec.traces.writer import TraceWriter

MAX_PASS_TOKENS = 1024
_MIN_PASS_TOKENS = 32
_MAX_SEQUENCES = 8

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in total)."""


class _Piece(NamedTuple):
    """Distributions and hidden states of a part of a sequence."""

    top: TopK
    states: NDArray[np.float32]


def open_teacher(options: RunOptions, length: int, max_tokens: int = MAX_PASS_TOKENS) -> LLM:
    """Load a target with memory for passes of as many tokens as fit, of at most `max_tokens`.

    length: tokens of the longest sequence.

    Raises BudgetExceeded if not even passes of few tokens fit.
    """
    n_sequences = max(1, min(_MAX_SEQUENCES, max_tokens // length))
    teaching = replace(
        options,
        exact=OFF,
        spec_type="ngram",  # its draft tokens are what memory is reserved for
        num_draft_tokens=max_tokens,
        parallel=n_sequences,
        ctx_size=length,
        kv_tokens=n_sequences * length,
    )
    try:
        return LLM(teaching)
    except BudgetExceeded:
        if max_tokens // 2 < _MIN_PASS_TOKENS:
            raise
        return open_teacher(options, length, max_tokens // 2)


class Teacher:
    """A loaded target that scores whole sequences.

    hidden_layers: layers whose hidden states are recorded as well.
    """

    def __init__(self, llm: LLM, target: str, hidden_layers: Sequence[int] = ()) -> None:
        self._llm, self._layers = llm, tuple(hidden_layers)
        self._num_tokens = llm.session.n_tokens
        self._top_k = min(DEFAULT_TOP_K, self._num_tokens)
        self._max_tokens = llm.session.options.max_target_tokens(llm.plan.n_draft_tokens)
        self._max_sequences = llm.session.options.max_num_seqs
        self._target = target
        if self._layers:
            llm.session.engine.call(lambda: llm.target.collect_hidden_states(self._layers))

    def record(
        self,
        sequences: Sequence[Sequence[int]],
        folder: Path,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Write the traces of sequences; those that the folder has already are left out.

        Raises TraceError, and errors of the models; complete sequences are kept then.
        """
        n_done = read_index(folder).n_sequences if (folder / INDEX).exists() else 0
        done, total = sum(map(len, sequences[:n_done])), sum(map(len, sequences))
        with ExitStack() as stack:
            writer: TraceWriter | None = None
            for batch in self._batches(sequences[n_done:]):
                pieces = self._llm.session.engine.call(partial(self._score, batch))
                if writer is None:
                    writer = TraceWriter(folder, self._header(pieces[0]))
                    stack.callback(writer.close)
                for token_ids, piece in zip(batch, pieces, strict=True):
                    writer.add(self._traced(token_ids, piece))
                done += sum(map(len, batch))
                progress(done, total)

    def _header(self, piece: _Piece) -> TraceHeader:
        width = piece.states.shape[1]
        return TraceHeader(self._num_tokens, self._target, self._top_k, self._layers, width)

    def _traced(self, token_ids: Sequence[int], piece: _Piece) -> TracedSequence:
        rows = np.arange(len(token_ids), dtype=np.int32)
        states = piece.states if self._layers else None
        return TracedSequence(np.asarray(token_ids, dtype=np.int32), rows, piece.top, states)

    def _batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """Yield sequences that fit in one pass; one that does not is alone."""
        batch: list[Sequence[int]] = []
        for sequence in sequences:
            n_tokens = sum(map(len, batch)) + len(sequence)
            if batch and (n_tokens > self._max_tokens or len(batch) == self._max_sequences):
                yield batch
                batch = []
            batch.append(sequence)
        if batch:
            yield batch

    def _score(self, batch: Sequence[Sequence[int]]) -> list[_Piece]:
        """Compute sequences in passes of at most `_max_tokens`; in the engine's thread."""
        target = self._llm.target
        with ExitStack() as stack:
            kvs = [target.new_sequence() for _ in batch]
            for kv in kvs:
                stack.callback(kv.close)
            parts: list[list[_Piece]] = [[] for _ in batch]
            longest = max(map(len, batch))
            step = longest if len(batch) > 1 else self._max_tokens  # several fit in one pass
            for start in range(0, longest, step):
                chunks = [sequence[start : start + step] for sequence in batch]
                active = [i for i, chunk in enumerate(chunks) if chunk]
                outputs = target.forward([self._input(kvs[i], chunks[i]) for i in active])
                for i, output in zip(active, outputs, strict=True):
                    parts[i].append(self._piece(output))
        return [self._joined(pieces) for pieces in parts]

    def _input(self, kv: SequenceKV, token_ids: Sequence[int]) -> SequenceInput:
        everywhere = range(len(token_ids))
        states_at = everywhere if self._layers else ()
        return SequenceInput(kv, token_ids, logits_at=everywhere, hidden_states_at=states_at)

    def _piece(self, output: SequenceOutput) -> _Piece:
        logits = output.logits[:, : self._num_tokens]
        return _Piece(TopK.of(logits, self._top_k), output.hidden_states)

    def _joined(self, pieces: list[_Piece]) -> _Piece:
        tops, states = zip(*pieces, strict=True)
        return _Piece(TopK.joined(list(tops), self._top_k), np.concatenate(states))

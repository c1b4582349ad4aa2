"""Recording of traces in runs (`--record-traces`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specdec.traces.format import DEFAULT_TOP_K, TracedSequence, TraceError, TraceHeader
from specdec.traces.top_k import TopK
from specdec.traces.writer import TraceWriter

logger = logging.getLogger(__name__)


class SequenceTrace:
    """Distributions after the last tokens of one sequence, until it ends."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._parts: list[TopK] = []

    def add(self, logits: Sequence[NDArray[np.float32]]) -> None:
        """Add the target's logits [vocab] that the next tokens were chosen by."""
        header = self._recorder.header
        if logits and not self._recorder.is_over:
            rows = np.stack([row[: header.vocab_size] for row in logits])
            self._parts.append(TopK.of(rows, header.top_k))

    def end(self, token_ids: Sequence[int], num_new_tokens: int) -> None:
        """Hand the sequence to the recorder.

        token_ids: prompt and generated tokens; the last `num_new_tokens` are generated. Later rows
        belong to tokens that a stop string cut off.
        """
        top = TopK.joined(self._parts, self._recorder.header.top_k)
        self._parts = []
        if not num_new_tokens or len(top.rest) < num_new_tokens:
            return  # cancelled in its prompt, or begun when nothing was recorded any more
        top = top.part(slice(num_new_tokens))
        first = len(token_ids) - num_new_tokens - 1
        rows = np.arange(first, first + num_new_tokens, dtype=np.int32)
        self._recorder.add(TracedSequence(np.asarray(token_ids, dtype=np.int32), rows, top))


class TraceRecorder:
    """Traces of a run: of each sequence its tokens, and the target's distribution of each generated
    one. Beam searches are not recorded.

    A full folder or disk ends the recording with a warning; the run goes on.

    Args:
        num_tokens: tokens that can be chosen.
        target: fingerprint of the target.

    Raises:
        TraceError: the folder cannot be written, or has traces of another model.
    """

    def __init__(self, folder: str | Path, num_tokens: int, target: str, max_bytes: int) -> None:
        self.header = TraceHeader(num_tokens, target, min(DEFAULT_TOP_K, num_tokens))
        self._writer = TraceWriter(Path(folder).expanduser(), self.header, max_bytes)
        self.is_over = False

    def new_sequence(self) -> SequenceTrace:
        return SequenceTrace(self)

    def add(self, sequence: TracedSequence) -> None:
        if self.is_over:
            return
        try:
            if not self._writer.add(sequence):
                self._end(f"{self._writer.describe_limit()} (--max-traces)")
        except TraceError as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        self.is_over = True
        logger.warning(f"{reason}; no more traces are recorded")

    def close(self) -> None:
        """Write what is buffered."""
        try:
            self._writer.close()
        except TraceError as error:
            self._end(str(error))

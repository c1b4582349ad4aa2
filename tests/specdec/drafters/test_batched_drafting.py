"""Inputs of several drafters that share a pass of the draft, and those that must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.contract.sequence import SequenceInput, SequenceOutput
from specdec.drafters.batched_drafting import DraftSteps, run_batched


@dataclass
class RecordingBackend:
    """A backend that notes the widths of the hidden states of each pass."""

    passes: list[list[int]] = field(default_factory=list)

    def n_fitting(self, batch: Sequence[SequenceInput]) -> int:
        return len(batch)

    def forward(self, batch: Sequence[SequenceInput]) -> list[SequenceOutput]:
        widths = [0 if x.hidden_states is None else x.hidden_states.shape[1] for x in batch]
        self.passes.append(widths)
        return [SequenceOutput([], np.zeros((1, 4), dtype=np.float32)) for _ in batch]


@dataclass
class RecordingSequence:
    backend: RecordingBackend


def steps(backend: RecordingBackend, widths: Sequence[int]) -> DraftSteps[int]:
    for width in widths:
        states = np.zeros((1, width), dtype=np.float32) if width else None
        yield SequenceInput(RecordingSequence(backend), [1], hidden_states=states)  # type: ignore[arg-type]
    return len(widths)


def test_levels_of_several_sequences_share_passes() -> None:
    backend = RecordingBackend()
    assert run_batched([steps(backend, [0, 0]), steps(backend, [0])]) == [2, 1]
    assert backend.passes == [[0, 0], [0]]


def test_hidden_states_of_two_widths_are_in_two_passes() -> None:
    """A head takes the target's states for a context and its own for nodes (EAGLE-3)."""
    backend = RecordingBackend()
    sequences = [steps(backend, [12, 4]), steps(backend, [12, 4]), steps(backend, [4])]
    assert run_batched(sequences) == [2, 2, 1]
    assert backend.passes == [[12, 12], [4], [4, 4]]

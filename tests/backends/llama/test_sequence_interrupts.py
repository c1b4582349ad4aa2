"""Ctrl-C anywhere in the life of several texts: what they hold is right, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exact_histories import Fresh
from interrupting import interrupted

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from gguf_texts import exact_source, load

from backends.contract.backend import PREFIX
from backends.contract.mending import KvSequence
from backends.contract.sequence import SequenceRows
from backends.llama.backend import LlamaBackend
from backends.llama.cache import TreeSequences

pytestmark = [
    pytest.mark.gguf,
    # An interrupt inside of a generator that is being dropped is reported, not raised.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def live(backend: LlamaBackend, *texts: KvSequence[TreeSequences]) -> None:
    """Prompts, a fork, passes of several texts whose trees leave gaps, and an end in between."""
    first, second = texts
    first.prefill([5] * 20)
    second.prefill([6] * 20)
    fork = second.fork(10)
    node = first.next_node_id
    tree = SequenceRows(first, [7, 8, 9], [PREFIX, PREFIX, node + 1])
    backend.run([tree, SequenceRows(fork, [5, 5, 4]), SequenceRows(second, [7], [PREFIX])])
    first.commit([node + 1, node + 2])
    second.rollback(15)
    fork.close()
    backend.run([SequenceRows(first, [3], [PREFIX]), SequenceRows(second, [3] * 4)])


def test_an_interrupt_at_every_seventh_call(tmp_path: Path) -> None:
    source = exact_source("llama", tmp_path, dtype="F32")
    with load(source) as backend, load(source) as other:
        alone, texts = Fresh(other), [backend.sequence() for _ in range(2)]
        for at in range(1, 3000, 7):
            with interrupted(at, (None, 1, 2, 5)[at % 4], ("backends", "offload")) as interrupts:
                live(backend, *texts)
            cells = set()
            for text in list(backend._sequences):
                committed = list(text.committed_ids)
                row = text.run(SequenceRows(text, [11], [PREFIX])).logits[0]
                assert np.array_equal(row, alone.row([*committed, 11]))
                cells.update(text.kv.cells)
            assert backend._cells.n_free == backend._cells.n_cells - len(cells)
            if not interrupts.places:
                break
            for text in set(backend._sequences) - set(texts):
                text.close()
            for text in texts:
                text.rollback(0)
        assert not interrupts.places

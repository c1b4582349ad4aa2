"""The peer: the same GGUF file on plain llama.cpp, its weights mapped from the file.

Plain greedy decoding or, with a draft, a chain of draft tokens verified in one batch, as
llama.cpp's own `speculative-simple` example does (its defaults: at most 16 draft tokens, and
drafting stops below a probability of 0.75). The low-level API is used, because the high-level class
of llama-cpp-python cannot switch repacked weights off: those are anonymous memory, and the kernel
kills a process that repacks a file larger than its limit.

    python -m bench.peer_llama TASK.json JOURNAL.jsonl       (see bench.peer_program)
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from bench.peer_program import Clock, Journal, Task, run_program
from bench.workloads import Prompt
from offload.errors import SpecdecError

MAX_DRAFT_TOKENS = 16
LEAST_DRAFT_PROBABILITY = 0.75


class Model:
    """A model with a context of one sequence, and the tokens that its cache holds."""

    def __init__(self, path: Path, n_ctx: int, n_threads: int) -> None:
        params = llama_cpp.llama_model_default_params()
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise SpecdecError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = n_ctx
        settings.n_threads = settings.n_threads_batch = n_threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SpecdecError(f"llama.cpp cannot make a context of {n_ctx} tokens for {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.tokens: list[int] = []

    def decode(self, tokens: Sequence[int], *, all_rows: bool = False) -> NDArray[np.float32]:
        """Append tokens; logits [n or 1, vocab] of all of them or the last."""
        n = len(tokens)
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, len(self.tokens) + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = int(all_rows or i == n - 1)
            status = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise SpecdecError(f"llama_decode returned {status}")
        self.tokens += tokens
        return np.stack([self._row(i) for i in (range(n) if all_rows else (n - 1,))])

    def cut(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise SpecdecError(f"llama.cpp cannot cut its cache to {length} tokens")
        del self.tokens[length:]

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        room = len(raw) + 8
        ids = (llama_cpp.llama_token * room)()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), ids, room, True, True)
        return list(ids[:n])

    def is_end(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    def _row(self, index: int) -> NDArray[np.float32]:
        row = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(row, shape=(self.n_vocab,)).copy()


class Decoder:
    """Greedy decoding with a target and, if given, a draft."""

    def __init__(self, target: Model, draft: Model | None, n_tokens: int, ignore_eos: bool) -> None:
        self._target, self._draft = target, draft
        self._n_tokens, self._ignore_eos = n_tokens, ignore_eos

    def run(self, prompt: Prompt, clock: Clock) -> dict[str, Any]:
        self._target.cut(0)
        if self._draft is not None:
            self._draft.cut(0)
        ids = self._target.tokenize(prompt.text)
        tokens = [int(self._target.decode(ids).argmax())]
        clock.arrive(1)
        while len(tokens) < self._n_tokens and not self._is_over(tokens) and not clock.is_up:
            new = self._round(ids + tokens, self._n_tokens - len(tokens))
            clock.arrive(len(new))
            tokens += new
        return {"token_ids": tokens}

    def _is_over(self, tokens: Sequence[int]) -> bool:
        return not self._ignore_eos and self._target.is_end(tokens[-1])

    def _round(self, context: Sequence[int], n_wanted: int) -> list[int]:
        """One batch of the target: the pending token and the draft's guesses."""
        drafted = self._propose(context, min(MAX_DRAFT_TOKENS, n_wanted - 1))
        rows = self._target.decode([context[-1], *drafted], all_rows=True)
        emitted: list[int] = []
        for row, guess in zip(rows, [*drafted, None], strict=True):
            emitted.append(int(row.argmax()))
            if emitted[-1] != guess or self._is_over(emitted):
                break
        self._target.cut(len(context) + len(emitted) - 1)
        return emitted

    def _propose(self, context: Sequence[int], n_most: int) -> list[int]:
        if self._draft is None or n_most < 1:
            return []
        known = _n_common(self._draft.tokens, context[:-1])
        self._draft.cut(known)
        row = self._draft.decode(context[known:])[-1]
        drafted: list[int] = []
        while len(drafted) < n_most:
            best = int(row.argmax())
            shifted = row.astype(np.float64) - row[best]
            if 1.0 / np.exp(shifted).sum() < LEAST_DRAFT_PROBABILITY:
                break
            drafted.append(best)
            if len(drafted) < n_most:
                row = self._draft.decode([best])[-1]
        return drafted


def _n_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    n = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        n += 1
    return n


def program(task: Task, journal: Journal) -> None:
    llama_cpp.llama_log_set(_say_nothing, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    target = Model(Path(task.model), task.n_ctx, task.n_threads)
    draft = None if task.draft is None else Model(Path(task.draft), task.n_ctx, task.n_threads)
    settings: dict[str, Any] = {
        "load_mode": "mmap",
        "use_extra_bufts": False,
        "n_ctx": task.n_ctx,
        "n_batch": task.n_ctx,
        "threads": task.n_threads,
    }
    if draft is not None:
        settings |= {
            "draft": task.draft,
            "most_draft_tokens": MAX_DRAFT_TOKENS,
            "least_draft_probability": LEAST_DRAFT_PROBABILITY,
        }
    journal.loaded(settings)
    journal.decode(Decoder(target, draft, task.n_tokens, task.ignore_eos).run)


@llama_cpp.llama_log_callback
def _say_nothing(level: int, text: bytes, data: Any) -> None:
    """llama.cpp's log is not part of the report."""


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:], program))

"""Peer: the same GGUF file on plain llama.cpp, its weights mapped from the file.

Plain greedy decoding or, with a draft, a chain of draft tokens verified in one batch, as
llama.cpp's own `speculative-simple` example does (common/speculative.cpp, "draft-simple"): the
draft's likeliest token at each step, until the chain is as long as allowed or its probability
*among the ten likeliest* falls below a threshold. Length and threshold are the caller's, as their
defaults changed between versions (bench.peers.registry.DRAFT_CHAINS). Two things favour the peer:
the draft keeps the KV of the tokens that it proposed, while the example decodes every verified
batch again, and the prompt's last token is not decoded in a pass of its own.

The low-level API is used, because the high-level class of llama-cpp-python cannot disable repacked
weights: those are anonymous memory, and the kernel kills a process that repacks a file larger than
its limit.

    python -m bench.peers.llama TASK.json JOURNAL.jsonl       (see bench.peers.program)
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from bench.peers.program import Clock, Journal, Task, run_program
from bench.prompts.workloads import Prompt
from offload.errors import SpecdecError

_N_CANDIDATES = 10
"""Number of candidates for a draft's probability: top_k of draft-simple's sampler."""
_N_UBATCH = 512
"""llama.cpp's default micro-batch: scratch memory grows with it, and reduces the page cache of the
weights."""


@dataclass(frozen=True)
class Chain:
    """Limits of a draft's chain."""

    max_count: int
    min_probability: float
    """Probability among the _N_CANDIDATES likeliest tokens below which the chain ends."""


class Model:
    """Model with a context of one sequence, and the tokens in its KV cache."""

    def __init__(self, path: Path, n_ctx: int, n_threads: int) -> None:
        params = llama_cpp.llama_model_default_params()
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise SpecdecError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = n_ctx
        settings.n_ubatch = min(n_ctx, _N_UBATCH)
        settings.n_threads = settings.n_threads_batch = n_threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SpecdecError(f"llama.cpp cannot make a context of {n_ctx} tokens for {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.batch_sizes = {
            "n_batch": llama_cpp.llama_n_batch(self._context),
            "n_ubatch": llama_cpp.llama_n_ubatch(self._context),
        }
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.tokens: list[int] = []

    def decode(self, tokens: Sequence[int], *, all_rows: bool = False) -> NDArray[np.float32]:
        """Append tokens; return logits [n or 1, vocab] of all of them or the last."""
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
        """Remove all tokens from `length` on."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise SpecdecError(f"llama.cpp cannot cut its cache to {length} tokens")
        del self.tokens[length:]

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        capacity = len(raw) + 8
        ids = (llama_cpp.llama_token * capacity)()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), ids, capacity, True, True)
        return list(ids[:n])

    def is_end(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    def _row(self, index: int) -> NDArray[np.float32]:
        row = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(row, shape=(self.n_vocab,)).copy()


class Decoder:
    """Greedy decoder with a target and, if given, a draft."""

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        chain: Chain,
        n_tokens: int,
        ignore_eos: bool,
    ) -> None:
        self._target, self._draft, self._chain = target, draft, chain
        self._n_tokens, self._ignore_eos = n_tokens, ignore_eos

    def run(self, prompt: Prompt, clock: Clock) -> dict[str, Any]:
        self._target.cut(0)
        ids = self._target.tokenize(prompt.text)
        tokens = [int(self._target.decode(ids).argmax())]
        if self._draft is not None:  # reads the prompt before the first token, as the example does
            self._draft.cut(0)
            self._draft.decode(ids)
        clock.reach(1)
        while len(tokens) < self._n_tokens and not self._is_over(tokens) and not clock.is_up:
            new = self._step(ids + tokens, self._n_tokens - len(tokens))
            clock.reach(len(new))
            tokens += new
        return {"token_ids": tokens}

    def _is_over(self, tokens: Sequence[int]) -> bool:
        return not self._ignore_eos and self._target.is_end(tokens[-1])

    def _step(self, context: Sequence[int], num_requested: int) -> list[int]:
        """Verify one batch: the pending token and the draft tokens; return the new tokens."""
        drafted = self._propose(context, min(self._chain.max_count, num_requested - 1))
        logits = self._target.decode([context[-1], *drafted], all_rows=True)
        emitted: list[int] = []
        for row, guess in zip(logits, [*drafted, None], strict=True):
            emitted.append(int(row.argmax()))
            if emitted[-1] != guess or self._is_over(emitted):
                break
        self._target.cut(len(context) + len(emitted) - 1)
        return emitted

    def _propose(self, context: Sequence[int], max_count: int) -> list[int]:
        if self._draft is None or max_count < 1:
            return []
        known = _n_common(self._draft.tokens, context[:-1])
        self._draft.cut(known)
        row = self._draft.decode(context[known:])[-1]
        drafted: list[int] = []
        while len(drafted) < max_count:
            best = int(row.argmax())
            if probability_of_best(row) < self._chain.min_probability:
                break
            drafted.append(best)
            if len(drafted) < max_count:
                row = self._draft.decode([best])[-1]
        return drafted


def probability_of_best(row: NDArray[np.float32]) -> float:
    """Return the best token's probability among the _N_CANDIDATES likeliest, of logits [vocab]."""
    n = min(_N_CANDIDATES, len(row))
    top = np.partition(row, len(row) - n)[-n:].astype(np.float64)
    return float(1.0 / np.exp(top - top.max()).sum())


def _n_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    n = 0
    for item, other in zip(first, second, strict=False):
        if item != other:
            break
        n += 1
    return n


def program(task: Task, journal: Journal) -> None:
    """Run a task. Its options, with a draft: max_draft_tokens, min_draft_probability."""
    llama_cpp.llama_log_set(_say_nothing, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    target = Model(Path(task.model), task.n_ctx, task.n_threads)
    draft, chain = None, Chain(0, 0.0)
    if task.draft is not None:
        draft = Model(Path(task.draft), task.n_ctx, task.n_threads)
        options = task.options
        chain = Chain(options["max_draft_tokens"], options["min_draft_probability"])
    settings: dict[str, Any] = {
        "load_mode": "mmap",
        "use_extra_bufts": False,
        "n_ctx": task.n_ctx,
        **target.batch_sizes,
        "threads": task.n_threads,
    }
    if draft is not None:
        settings |= {
            "draft": task.draft,
            "max_draft_tokens": chain.max_count,
            "min_draft_probability": chain.min_probability,
        }
    journal.loaded(settings)
    journal.decode(Decoder(target, draft, chain, task.n_tokens, task.ignore_eos).run)


@llama_cpp.llama_log_callback
def _say_nothing(level: int, text: bytes, data: Any) -> None:
    """Drop llama.cpp's log, which is not part of the report."""


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:], program))

"""Peer: the same GGUF file on a recent llama.cpp server, plain or with its MTP head.

The server runs in this process (xllamacpp, which has llama.cpp's own server and parameters), with
weights mapped from the file. Its wheels on PyPI are compiled for every processor, without AVX-512:
behind a memory limit it waits for storage, and the difference is small.

    python -m bench.peers.llama_server TASK.json JOURNAL.jsonl       (see bench.peers.program)
"""

from __future__ import annotations

import sys
from typing import Any

from bench.peers.program import Clock, Journal, Task, run_program
from bench.prompts.workloads import Prompt
from offload.errors import SpecdecError

_MILLISECONDS = 1000


class Decoder:
    """Greedy completions of a server."""

    def __init__(self, server: Any, task: Task) -> None:
        self._server, self._task = server, task

    def run(self, prompt: Prompt, clock: Clock) -> dict[str, Any]:
        pieces: list[str] = []

        def receive(event: dict[str, Any]) -> None:
            if "error" in event:
                raise SpecdecError(str(event["error"]))
            choice = event["choices"][0]
            if choice["finish_reason"] is None:
                clock.reach(1)
                pieces.append(choice["text"])

        self._server.handle_completions(
            {
                "prompt": prompt.text,
                "max_tokens": self._task.n_tokens,
                "temperature": 0.0,
                "ignore_eos": self._task.ignore_eos,
                "stream": True,
                "cache_prompt": False,
                "t_max_predict_ms": round(_MILLISECONDS * clock.limit_seconds),
            },
            receive,
        )
        return {"text": "".join(pieces)}


def program(task: Task, journal: Journal) -> None:
    """Run a task. Its options, with the head: max_draft_tokens, min_draft_probability."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = task.model
    params.n_ctx, params.n_parallel, params.warmup = task.n_ctx, 1, False
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.no_extra_bufts = True  # repacked weights are no page cache, and would not fit
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.n_threads
    settings: dict[str, Any] = {
        "load_mode": "mmap",
        "use_extra_bufts": False,
        "n_ctx": task.n_ctx,
        "n_batch": params.n_batch,
        "n_ubatch": params.n_ubatch,
        "threads": task.n_threads,
    }
    if task.options:
        params.load_mtp = True
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = task.options["max_draft_tokens"]
        params.speculative.draft.p_min = task.options["min_draft_probability"]
        settings |= {"draft": "its MTP head", **task.options}
    server = xllamacpp.Server(params)
    journal.loaded(settings)
    journal.decode(Decoder(server, task).run)


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:], program))

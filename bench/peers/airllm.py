"""Peer: the same checkpoint on AirLLM.

Set up as documented: `AutoModel.from_pretrained` splits the checkpoint into one file for each
layer, together as large as the checkpoint (in the folder `rewritten`, for the next process: the
first one decodes no prompt), and reads them one after another in every pass. Compression stays off,
as it would change the weights; prefetching stays on, its default; the device is the CPU. The KV
cache stays on, the default of `generate`.

AirLLM 4.0.0 runs on the CPU unmodified. After every layer it runs the garbage collector of Python
(airllm.utils.clean_memory), which costs most of a pass if layers are small.

    python -m bench.peers.airllm TASK.json JOURNAL.jsonl       (see bench.peers.program)
"""

from __future__ import annotations

import sys

from bench.peers.accelerate import Decoder
from bench.peers.program import Journal, Task, run_program


def program(task: Task, journal: Journal) -> None:
    """Run a task. Its options: rewritten, a folder for the split checkpoint."""
    import airllm
    import torch
    from transformers import AutoConfig

    torch.set_num_threads(task.n_threads)
    dtype = getattr(AutoConfig.from_pretrained(task.model), "dtype", None) or torch.float32
    model = airllm.AutoModel.from_pretrained(
        task.model,
        device="cpu",
        dtype=dtype,
        max_seq_len=task.n_ctx,
        layer_shards_saving_path=task.options["rewritten"],
    )
    if task.ignore_eos:
        model.generation_config.eos_token_id = None
    journal.loaded(
        {
            "device": "cpu",
            "dtype": str(dtype).removeprefix("torch."),
            "max_seq_len": task.n_ctx,
            "compression": None,
            "prefetching": getattr(model, "prefetching", None),
            "threads": task.n_threads,
        }
    )
    journal.decode(Decoder(model, model.tokenizer, None, task.n_tokens).run)


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:], program))

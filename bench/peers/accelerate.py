"""Peer: the same checkpoint on transformers + accelerate with disk offload.

Set up as the accelerate guide on big models recommends: `device_map="auto"` with a `max_memory`
for the CPU, the rest on disk. The safetensors files are read where they lie (transformers'
offload index), nothing is written. With a draft it is handed to `generate` as `assistant_model`.

    python -m bench.peers.accelerate TASK.json JOURNAL.jsonl       (see bench.peers.program)
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.peers.program import Clock, Journal, Task, run_program
from bench.prompts.workloads import Prompt


def program(task: Task, journal: Journal) -> None:
    """Run a task. Its options: cpu_memory_bytes, memory for weights."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(task.n_threads)
    tokenizer = AutoTokenizer.from_pretrained(task.model, local_files_only=True)
    cpu_memory_bytes = int(task.options["cpu_memory_bytes"])
    with tempfile.TemporaryDirectory(prefix="specdec-peer-") as offload_dir:
        model = load_offloaded(Path(task.model), cpu_memory_bytes, offload_dir)
        settings = {
            "device_map": "auto",
            "max_memory": {"cpu": cpu_memory_bytes},
            "dtype": str(model.dtype).removeprefix("torch."),
            "resident_modules": count_modules(model, "cpu"),
            "disk_modules": count_modules(model, "disk"),
            "threads": task.n_threads,
        }
        assistant = None
        if task.draft is not None:
            assistant = load_assistant(Path(task.draft), model.config.vocab_size)
            settings |= {"assistant_model": task.draft, "assistant_schedule": "default"}
        if task.ignore_eos:
            model.generation_config.eos_token_id = None
        journal.loaded(settings)
        decoder = Decoder(model, tokenizer, assistant, task.n_tokens)
        journal.decode(decoder.run)


class Decoder:
    """Greedy decoder by `generate`, of any model with its interface."""

    def __init__(self, model: Any, tokenizer: Any, assistant: Any, n_tokens: int) -> None:
        self._model, self._tokenizer, self._n_tokens = model, tokenizer, n_tokens
        self._more: dict[str, Any] = {} if assistant is None else {"assistant_model": assistant}

    def run(self, prompt: Prompt, clock: Clock) -> dict[str, Any]:
        import torch

        inputs = self._tokenizer(prompt.text, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        if self._model.device.type != "meta":  # a part that is on disk
            inputs = inputs.to(self._model.device)
        with torch.inference_mode():
            output = self._model.generate(
                **inputs,
                max_new_tokens=self._n_tokens,
                do_sample=False,
                streamer=Arrivals(clock),
                stopping_criteria=[lambda ids, scores, **more: _all(ids, clock.is_up)],
                **self._more,
            )
        return {"token_ids": output[0, inputs["input_ids"].shape[1] :].tolist()}


class Arrivals:
    """Streamer for `generate` that notes the arrival of tokens on a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:  # the first call has the prompt
            self._clock.reach(int(value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


def _all(ids: Any, is_over: bool) -> Any:
    """Return the result of a stopping criterion: one bool for each sequence."""
    import torch

    return torch.full((ids.shape[0],), is_over, dtype=torch.bool, device=ids.device)


def load_offloaded(
    model_dir: Path, cpu_memory_bytes: int, offload_dir: str, vram_bytes: int | None = None
) -> Any:
    """Load the model with as many layers in memory as the limits allow, the rest on disk.

    vram_bytes: limit of the first GPU; None computes on the CPU.
    """
    from transformers import AutoModelForCausalLM

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # says that weights are on disk
    return AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype="auto",
        device_map="auto",
        max_memory={"cpu": cpu_memory_bytes} | ({} if vram_bytes is None else {0: vram_bytes}),
        offload_folder=offload_dir,
        local_files_only=True,
    ).eval()


def load_assistant(draft_dir: Path, vocab_size: int) -> Any:
    """Load the draft into memory, its vocabulary padded to the target's size.

    `generate` compares the two sizes, and would re-tokenize between vocabularies that differ only
    in padding. The added rows are copies of the last real one: hardly ever chosen.
    """
    import torch
    from transformers import AutoModelForCausalLM

    assistant = AutoModelForCausalLM.from_pretrained(
        draft_dir, dtype="auto", local_files_only=True
    ).eval()
    n_real = assistant.config.vocab_size
    if n_real < vocab_size:
        assistant.resize_token_embeddings(vocab_size, mean_resizing=False)
        with torch.no_grad():
            for embedding in (assistant.get_input_embeddings(), assistant.get_output_embeddings()):
                embedding.weight[n_real:] = embedding.weight[n_real - 1]
    return assistant


def count_modules(model: Any, place: str | int) -> int:
    """Return the number of modules that accelerate placed there; 0 if all fits on the CPU."""
    return sum(where == place for where in getattr(model, "hf_device_map", {}).values())


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:], program))

"""The peer: the same checkpoint on transformers + accelerate with disk offload.

Set up as the accelerate guide on big models recommends: `device_map="auto"` with a `max_memory`
for the CPU, the rest on disk. The safetensors files are read where they lie (transformers'
offload index), nothing is written. Started as a process of its own, inside the same memory limit
as ours; prints one JSON object.

    python -m bench.peer_accelerate --model DIR --prompts FILE --cpu-memory BYTES --output FILE
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.workloads import Prompt, read_prompts


class TokenClock:
    """A streamer for `generate`: the time at which each new token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:  # the first call brings the prompt
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def load_offloaded(model_dir: Path, cpu_memory_bytes: int, offload_dir: str) -> Any:
    """The model with as many layers in memory as `cpu_memory_bytes` allows, the rest on disk."""
    from transformers import AutoModelForCausalLM

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # says that weights are on disk
    return AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype="auto",
        device_map="auto",
        max_memory={"cpu": cpu_memory_bytes},
        offload_folder=offload_dir,
        local_files_only=True,
    ).eval()


def run_prompt(model: Any, tokenizer: Any, prompt: Prompt, n_tokens: int) -> dict[str, Any]:
    """Greedy decoding of one prompt; `decode_seconds` starts when the first token is there."""
    import torch

    inputs = tokenizer(prompt.text, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    clock = TokenClock()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=n_tokens, do_sample=False, streamer=clock)
    token_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "prompt": prompt.name,
        "token_ids": token_ids,
        "time_to_first_token": clock.times[0] - start,
        "decode_seconds": clock.times[-1] - clock.times[0],
        "decode_tokens": len(clock.times) - 1,
    }


def run_peer(
    model_dir: Path,
    prompts: Sequence[Prompt],
    n_tokens: int,
    cpu_memory_bytes: int,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from offload.memory import process_memory

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    with tempfile.TemporaryDirectory(prefix="specdec-peer-") as offload_dir:
        start = time.perf_counter()
        model = load_offloaded(model_dir, cpu_memory_bytes, offload_dir)
        if ignore_eos:
            model.generation_config.eos_token_id = None
        load_seconds = time.perf_counter() - start
        records = [run_prompt(model, tokenizer, prompt, n_tokens) for prompt in prompts]
    return {
        "load_seconds": load_seconds,
        "cpu_memory_bytes": cpu_memory_bytes,
        "resident_modules": _count(model, "cpu"),
        "disk_modules": _count(model, "disk"),
        "peak_rss_bytes": process_memory().peak_rss_bytes,
        "prompts": records,
    }


def _count(model: Any, place: str) -> int:
    return sum(where == place for where in getattr(model, "hf_device_map", {}).values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="transformers + accelerate disk offload")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--cpu-memory", type=int, required=True, metavar="BYTES")
    parser.add_argument("--n-tokens", type=int, default=8)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args(argv)
    result = run_peer(
        arguments.model,
        read_prompts(arguments.prompts),
        arguments.n_tokens,
        arguments.cpu_memory,
        arguments.ignore_eos,
    )
    arguments.output.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

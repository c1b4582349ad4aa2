"""Text for draft heads of the embedded target: what it writes itself after the corpus's documents.

    python -m bench.train.head_text --root SITE_PACKAGES --minutes 20 -o heads-text
    specdec train-draft -m pair:target --kind mtp --text heads-text --generate 0 -o mtp

Each file is the beginning of a document and the target's continuation, half of them greedy.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.train.corpus import collect
from bench.train.data import END_OF_TEXT, encode, mixed_documents
from bench.train.distil import (
    GENERATE_PROMPTS,
    SAMPLE_TEMPERATURE,
    continue_prompts,
    opening_prompts,
)
from specdec.models.names import resolve_model

SEQUENCE_TOKENS = 320
"""As long as the benchmarks' prompts with their output."""
PROMPT_TOKENS = (48, 128, 208)
CAP_BYTES = 4_000_000


def main(
    out: Annotated[Path, typer.Option("-o", "--out", help="New folder for the text.")],
    root: Annotated[list[Path] | None, typer.Option(help="Folder of distributions.")] = None,
    minutes: float = 20.0,
    seed: int = 0,
) -> None:
    """Write the continuations of random documents until the time is over."""
    directory = resolve_model("pair:target")
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(directory).backend_tokenizer
    corpus = collect(root or [], CAP_BYTES)
    documents = mixed_documents(corpus.train_files, corpus.train_functions, seed)
    stream = encode(tokenizer, documents)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    out.mkdir(parents=True)
    typer.echo(f"{len(documents)} documents of {len(stream)} tokens")
    deadline = time.monotonic() + 60 * minutes
    number = 0
    while time.monotonic() < deadline:
        for text in _continuations(model, tokenizer, stream, seed + number):
            (out / f"{number:06d}.txt").write_text(text, encoding="utf-8")
            number += 1
        typer.echo(f"{number * SEQUENCE_TOKENS} tokens")


def _continuations(
    model: AutoModelForCausalLM, tokenizer: Tokenizer, stream: np.ndarray, seed: int
) -> list[str]:
    """Return texts of a batch of prompts, all of one length; the seed decides which."""
    rng = np.random.default_rng(seed)
    n_tokens = int(rng.choice(PROMPT_TOKENS))
    separator = tokenizer.token_to_id(END_OF_TEXT)
    assert separator is not None, "the pair's vocabulary has it"
    prompts = opening_prompts(stream, separator, GENERATE_PROMPTS, seed, n_tokens)
    generator = torch.Generator().manual_seed(seed)
    temperature = SAMPLE_TEMPERATURE if rng.random() < 0.5 else 0.0
    n_new = SEQUENCE_TOKENS - n_tokens
    ids = continue_prompts(model, prompts, n_new, temperature, generator)
    decoded = (tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in ids)
    return [text.removeprefix(END_OF_TEXT).partition(END_OF_TEXT)[0] for text in decoded]


if __name__ == "__main__":
    typer.run(main)

"""Tokenizer and token streams of the embedded pair."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"  # document separator; also bos, eos and padding
HEADER = "from typing import Any, Dict, List, Optional, Tuple\n\n\n"
HEADER_SHARE = 0.35  # of the function documents: a prompt often begins with its imports
FUNCTION_SHARE = 0.4  # of the documents' bytes
MAX_POSITIONS = 2048


def train_tokenizer(
    outputs: list[str], vocab_size: int, sample_bytes: int = 12_000_000
) -> Tokenizer:
    """Train a byte-level BPE that splits words exactly like GPT-2's (and GGUF's `gpt2`)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample, n_bytes = [], 0
    for text in random.Random(0).sample(outputs, len(outputs)):
        sample.append(text)
        n_bytes += len(text)
        if n_bytes > sample_bytes:
            break
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for transformers.AutoTokenizer."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Encode documents, each preceded by the separator, into one uint16 stream [n_tokens]."""
    separator = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype=np.uint16)
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), 512):
        for encoding in tokenizer.encode_batch(documents[start : start + 512]):
            parts += [separator, np.array(encoding.ids, dtype=np.uint16)]
    return np.concatenate(parts)


def mixed_documents(files: list[str], functions: list[str], seed: int) -> list[str]:
    """Shuffle files with functions, so that functions make `FUNCTION_SHARE` of the text."""
    rng = random.Random(seed)
    max_size = sum(map(len, files)) * FUNCTION_SHARE / (1 - FUNCTION_SHARE)
    documents, size = list(files), 0.0
    for function in rng.sample(functions, len(functions)):
        if size > max_size:
            break
        document = HEADER + function if rng.random() < HEADER_SHARE else function
        documents.append(document)
        size += len(document)
    rng.shuffle(documents)
    return documents


@dataclass
class WindowSampler:
    """Sampler of windows of a token stream, in a seeded order with each window once per epoch.

    The position in the order is counted in tokens, so the window length may change during training
    and a resumed run continues where it stopped.
    """

    stream: np.ndarray  # [n_tokens], uint16
    seed: int
    tokens_seen: int = 0

    def next_batch(self, batch_size: int, length: int) -> torch.Tensor:
        """Return int64 ids [batch_size, length + 1]: inputs and, shifted by one, their targets."""
        return torch.stack([self._window(length) for _ in range(batch_size)])

    def _window(self, length: int) -> torch.Tensor:
        per_epoch = (len(self.stream) - length - 1) // length
        epoch, index = divmod(self.tokens_seen // length, per_epoch)
        # A seeded affine map covers all windows without a permutation in memory.
        rng = random.Random(self.seed * 1_000_003 + epoch)
        step = _coprime_step(per_epoch, rng)
        start = ((index * step + rng.randrange(per_epoch)) % per_epoch) * length
        start += rng.randrange(length)  # epochs are cut at different offsets
        self.tokens_seen += length
        window = self.stream[start : start + length + 1].astype(np.int64)
        return torch.from_numpy(window)


def _coprime_step(modulus: int, rng: random.Random) -> int:
    from math import gcd

    step = rng.randrange(modulus // 3, max(modulus // 3 + 1, modulus // 2)) | 1
    while gcd(step, modulus) != 1:
        step += 1
    return step


def validation_batches(stream: np.ndarray, batch_size: int, length: int) -> Iterator[torch.Tensor]:
    """Yield consecutive windows [batch_size, length + 1] of a held-out stream."""
    span = batch_size * length
    for start in range(0, len(stream) - span - 1, span):
        rows = [
            stream[start + i * length : start + (i + 1) * length + 1] for i in range(batch_size)
        ]
        yield torch.from_numpy(np.stack(rows).astype(np.int64))

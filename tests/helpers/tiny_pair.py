"""A tiny target and draft with a byte-level tokenizer: everything for a run, in 0.2 MB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import save_tiny_checkpoint

SPECIAL = ("<pad>", "<s>", "</s>")
VOCAB = len(SPECIAL) + 256


def save_tokenizer(directory: Path, first: int = 0, special: tuple[str, ...] = SPECIAL) -> None:
    """Write a tokenizer of special tokens, then bytes; `first` rotates them: a wrong vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rotated = letters[first:] + letters[:first]
    vocab = {token: index for index, token in enumerate([*special, *rotated])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    ).save_pretrained(directory)


def save_model(directory: Path, seed: int, first: int = 0, **overrides: Any) -> Path:
    values = {"vocab_size": VOCAB, "max_position_embeddings": 32768, **overrides}
    save_tiny_checkpoint("llama", directory, seed, **values)
    save_tokenizer(directory, first)
    return directory

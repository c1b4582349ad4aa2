"""Tiny tokenizers of every kind found in checkpoints and GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from specdec.text.tokenizer import Tokenizer

CONTROLS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
ADDED = ("<think>", "</think>", "<tool_call>")  # added, but with their own text
OTHER_NAMES = {text: chr(0xF1000 + i) * 3 for i, text in enumerate(CONTROLS)}
"""The control tokens of a tokenizer that treats CONTROLS as text, with the same ids."""
CORPUS = [
    "hello world, hello you",
    "the end of a system's turn",
    "naïve café über",
    "日本語 中文 😀",
]


def byte_level(controls: Sequence[str] = CONTROLS) -> Any:
    """GPT-2's tokenizer, as Qwen's and Llama 3's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", *controls],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return _loaded(tokenizer, controls)


def _pieces(controls: Sequence[str]) -> dict[str, int]:
    pieces = ["<unk>", *controls, *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz.,<>|_/", "▁h", "▁he", "llo", "lo", "▁w", "or", "en"]
    return {read_chunk: i for i, read_chunk in enumerate(pieces)}


def sentencepiece_bpe(controls: Sequence[str] = CONTROLS, legacy: bool = False) -> Any:
    """Llama 2's and Mistral's tokenizer: ▁ for spaces, bytes for text without a piece.

    legacy: a space before every part between control tokens, not before the first alone.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [("▁", "a"), ("▁", "h"), ("▁h", "e"), ("▁", "w"), ("o", "r"), ("l", "o"), ("l", "lo"),
              ("e", "n")]  # fmt: skip
    model = models.BPE(
        _pieces(controls), merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = _sentencepiece_decoder(decoders)
    return _loaded(tokenizer, controls)


def unigram(controls: Sequence[str] = CONTROLS) -> Any:
    """A tokenizer as T5's and Gemma's, with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = _pieces(controls)
    scores = [
        (read_chunk, -float(10 - len(read_chunk)) if i > 260 else -20.0)
        for read_chunk, i in pieces.items()
    ]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    tokenizer.decoder = _sentencepiece_decoder(decoders)
    return _loaded(tokenizer, controls)


def _sentencepiece_decoder(decoders: Any) -> Any:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def word_piece(controls: Sequence[str] = CONTROLS) -> Any:
    """BERT's tokenizer: a space before every token that does not begin with ##."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyzéß中.,"
    tokens = ["<unk>", *controls, *letters, *(f"##{letter}" for letter in letters), "hello", "##lo"]
    tokenizer = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _loaded(tokenizer, controls)


def _loaded(tokenizer: Any, controls: Sequence[str]) -> Any:
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    *turns, bos, eos = controls
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=turns,
    )
    loaded.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return loaded


def save_gguf(path: Path, kind: str, controls: Sequence[str]) -> Path:
    """Write only the vocabulary of such a model, for llama.cpp."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_rope_dimension_count, 16),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    types = gguf.TokenType
    if kind == "gguf-bpe":
        import json

        backend = byte_level(controls).backend_tokenizer
        ids = backend.get_vocab(with_added_tokens=True)
        tokens = sorted(ids, key=ids.__getitem__)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        merges = json.loads(backend.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_add_bos_token(True)
    else:
        tokens = [*_pieces(controls), *ADDED]
        tokens += ["</", "s>"] if kind == "gguf-spm-merging" else []
        writer.add_tokenizer_model("llama")
        n_merged = [0.0 if token[:1] in "<" else -float(len(token) < 2) for token in tokens]
        writer.add_token_scores(n_merged)
    writer.add_token_list(tokens)
    known = {"<unk>": types.UNKNOWN, **dict.fromkeys(controls, types.CONTROL)}
    known |= dict.fromkeys(ADDED, types.USER_DEFINED)
    is_byte = {f"<0x{i:02X}>" for i in range(256)}
    writer.add_token_types(
        [known.get(item, types.BYTE if item in is_byte else types.NORMAL) for item in tokens]
    )
    writer.add_bos_token_id(tokens.index(controls[2]))
    writer.add_eos_token_id(tokens.index(controls[3]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_OF_CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece_bpe,
    "sentencepiece-legacy": partial(sentencepiece_bpe, legacy=True),
    "unigram": unigram,
    "word-piece": word_piece,
}
KINDS = [*_OF_CHECKPOINTS][:-1]
"""Checkpoint tokenizers from whose ids any text can be recovered."""
GGUF_KINDS = ["gguf-spm", "gguf-spm-merging", "gguf-bpe"]


@lru_cache
def tiny_tokenizer(kind: str, controls: tuple[str, ...] = CONTROLS) -> Any:
    if kind in _OF_CHECKPOINTS:
        return Tokenizer(_OF_CHECKPOINTS[kind](controls))
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from specdec.text.gguf_tokenizer import GgufTokenizer

    with TemporaryDirectory() as folder:
        return GgufTokenizer(save_gguf(Path(folder) / "vocabulary.gguf", kind, controls))

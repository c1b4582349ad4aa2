"""GGUF models with one defect each: every cause for llama.cpp and ggml to throw or abort while they
read a header and a vocabulary, build a graph, tokenize a text or compute."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from gguf_vocabularies import (
    BYTE,
    N_TOKENS,
    NORMAL,
    TOKENIZER,
    UNUSED,
    Metadata,
    TinyModel,
    vocabulary,
)


def _tokens(kind: str, changes: Mapping[int, str | bytes]) -> Metadata:
    """Return the list of tokens with some replaced."""
    tokens = list(vocabulary(kind)[f"{TOKENIZER}tokens"][1])
    for at, token in changes.items():
        tokens[at] = token
    return {f"{TOKENIZER}tokens": ("[str]", tokens)}


def _types(kind: str, changes: Mapping[int, int]) -> Metadata:
    types = list(vocabulary(kind)[f"{TOKENIZER}token_type"][1])
    for at, its_type in changes.items():
        types[at] = its_type
    return {f"{TOKENIZER}token_type": ("[i32]", types)}


def _key(name: str, kind: str, value: Any) -> Metadata:
    return {f"{TOKENIZER}{name}": (kind, value)}


def _value(name: str, kind: str, value: Any) -> Metadata:
    return {f"llama.{name}": (kind, value)}


def _tensor(name: str, kind: str, *shape: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (kind, shape)}


def _ids(**ids: int) -> Metadata:
    return {f"{TOKENIZER}{role}_token_id": ("u32", i) for role, i in ids.items()}


_ADD = {f"{TOKENIZER}add_bos_token": ("bool", True)}
_SPM_BYTES = {3 + i: f"no byte {i}" for i in range(256)}


def _table(units: Mapping[int, int]) -> bytes:
    """sentencepiece's table of normalised characters: 256 units, some of which are not 0."""
    length, values = 4 * 256, [units.get(i, 0) for i in range(256)]
    return struct.pack("<257I", length, *values) + b"x\0"


BROKEN: dict[str, TinyModel] = {
    # SPM: unknown text is spelled in bytes.
    "spm without bytes": TinyModel("spm", _tokens("spm", _SPM_BYTES)),
    "spm without one byte": TinyModel("spm", _tokens("spm", {3 + 0xE4: "x"})),
    "spm without the byte 0": TinyModel("spm", _tokens("spm", {3: "\0"})),
    "spm whose byte token ends early": TinyModel(
        "spm", _types("spm", {300: BYTE}) | _tokens("spm", {300: "x"})
    ),
    "spm, two tokens that differ behind a zero": TinyModel(
        "spm", _tokens("spm", {300: "same\0a", 301: "same\0b"})
    ),
    "spm, a token named like an empty one": TinyModel(
        "spm", _tokens("spm", {300: "", 301: "[EMPTY_300]"})
    ),
    "spm, a token twice": TinyModel("spm", _tokens("spm", {300: "the"})),
    "spm named phi3 without </s>": TinyModel(
        "spm", _tokens("spm", {2: "end"}) | {"general.name": ("str", "phi3")}
    ),
    # BPE
    "bpe without merges": TinyModel("bpe", {f"{TOKENIZER}merges": None}),
    "bpe with an unknown pre-tokenizer": TinyModel("bpe", _key("pre", "str", "nobody's")),
    "bpe that adds a start it has not": TinyModel(
        "bpe", _ADD | _key("model", "str", "gemma4") | {f"{TOKENIZER}bos_token_id": None}
    ),
    "bpe with a token of invalid UTF-8": TinyModel("bpe", _tokens("bpe", {300: b"\xff\xfe"})),
    "bpe with a token beyond Unicode": TinyModel("bpe", _tokens("bpe", {300: b"\xf7\xbf\xbf\xbf"})),
    "bpe split at spaces": TinyModel(
        "bpe", _key("model", "str", "whitespace") | _key("pre", "str", "whitespace")
    ),
    "bpe whose pre-tokenizer is of words": TinyModel("bpe", _key("pre", "str", "whitespace")),
    "bpe of nucleotides": TinyModel(
        "bpe", _key("model", "str", "hybriddna") | _key("pre", "str", "default")
    ),
    # WPM
    "wpm with byte tokens": TinyModel("wpm", _types("wpm", {300: BYTE})),
    # UGM
    "ugm that adds a start it has not": TinyModel("ugm", _ADD),
    "ugm with a table that is too short": TinyModel(
        "ugm", _key("precompiled_charsmap", "[i8]", [0, 0])
    ),
    "ugm with a table that leads nowhere": TinyModel(
        "ugm", _key("precompiled_charsmap", "[u8]", [4, 0, 0, 0, 0, 252, 255, 127, 0])
    ),
    "ugm with a table that leads nowhere behind a letter": TinyModel(
        "ugm", _key("precompiled_charsmap", "[u8]", list(_table({ord("q"): 5000 << 10 | ord("q")})))
    ),
    "ugm with a very long token": TinyModel("ugm", _tokens("ugm", {300: "x" * 500_000})),
    # RWKV
    "rwkv without a token for the unknown": TinyModel(
        "rwkv", {f"{TOKENIZER}unknown_token_id": None} | _tokens("rwkv", {1 + ord("~"): "xyz"})
    ),
    "rwkv without a line break": TinyModel(
        "rwkv", {f"{TOKENIZER}unknown_token_id": None} | _tokens("rwkv", {1 + 10: "xyz"})
    ),
    # All kinds
    "plamo2 without bytes": TinyModel(
        "spm", _key("model", "str", "plamo2") | _types("spm", {3: NORMAL})
    ),
    "an unknown kind": TinyModel("spm", _key("model", "str", "nobody's")),
    "no vocabulary": TinyModel("spm", _key("model", "str", "no_vocab")),
    "no tokens": TinyModel("bpe", {f"{TOKENIZER}tokens": None}),
    "numbers for tokens": TinyModel("bpe", _key("tokens", "[u32]", [5] * N_TOKENS)),
    "too few scores": TinyModel("spm", _key("scores", "[f32]", [0.5])),
    "no tokens in use": TinyModel("bpe", _types("bpe", dict.fromkeys(range(N_TOKENS), UNUSED))),
    "types of floats": TinyModel("spm", _key("token_type", "[f32]", [1.0] * N_TOKENS)),
    "suppressed tokens of texts": TinyModel("bpe", _key("suppress_tokens", "[str]", ["1"])),
    "a text for an id": TinyModel("bpe", {f"{TOKENIZER}eos_token_id": ("str", "2")}),
    "a list for an id": TinyModel("bpe", {f"{TOKENIZER}eos_token_id": ("[u32]", [2])}),
    "a number for the chat template": TinyModel("bpe", {"tokenizer.chat_template": ("u32", 5)}),
    # Values
    "more groups than heads": TinyModel(changes=_value("attention.head_count_kv", "u32", 3)),
    "no heads": TinyModel(changes=_value("attention.head_count", "u32", 0)),
    "odd rotation": TinyModel(changes=_value("rope.dimension_count", "u32", 15)),
    "a scaling that nobody knows": TinyModel(changes=_value("rope.scaling.type", "str", "odd")),
    "a scaling factor of zero": TinyModel(
        changes=_value("rope.scaling.type", "str", "yarn")
        | _value("rope.scaling.factor", "f32", 0.0)
    ),
    "a yarn of no context": TinyModel(
        changes=_value("rope.scaling.type", "str", "yarn")
        | _value("rope.scaling.original_context_length", "u32", 0)
    ),
    "values of another length": TinyModel(changes=_value("attention.value_length", "u32", 24)),
    "a list for the feed-forward length": TinyModel(
        changes=_value("feed_forward_length", "[u32]", [1, 2, 3])
    ),
    "another feed-forward length": TinyModel(changes=_value("feed_forward_length", "u32", 77)),
    "experts without tensors": TinyModel(
        changes=_value("expert_count", "u32", 4) | _value("expert_used_count", "u32", 2)
    ),
    "more experts than llama.cpp counts": TinyModel(
        changes=_value("expert_count", "u32", 5000) | _value("expert_used_count", "u32", 2)
    ),
    "another number of tokens": TinyModel(changes=_value("vocab_size", "u32", 7)),
    "a rotation in sections of no length": TinyModel(architecture="paddleocr"),
    "no experts where some are needed": TinyModel(architecture="smallthinker"),
    "an unknown architecture": TinyModel(architecture="nobody"),
    "a clamp that is no number": TinyModel(
        changes=_value("attention.clamp_kqv", "f32", float("nan"))
    ),
    # Tensors
    "no output norm": TinyModel(tensors={"output_norm.weight": None}),
    "a norm of another length": TinyModel(tensors=_tensor("blk.0.attn_norm.weight", "F32", 32)),
    "a norm in half precision": TinyModel(tensors=_tensor("blk.0.attn_norm.weight", "F16", 64)),
    "a query of another shape": TinyModel(tensors=_tensor("blk.0.attn_q.weight", "F32", 64, 32)),
    "a query in a format of activations": TinyModel(
        tensors=_tensor("blk.0.attn_q.weight", "Q8_1", 64, 64)
    ),
    "a head in a format of activations": TinyModel(
        tensors=_tensor("output.weight", "Q8_1", N_TOKENS, 64)
    ),
    "a head of other rows": TinyModel(tensors=_tensor("output.weight", "F32", N_TOKENS - 1, 64)),
    "a tensor that nobody knows": TinyModel(tensors=_tensor("blk.0.nobody.weight", "F32", 64, 64)),
    "a bias of another length": TinyModel(tensors=_tensor("blk.0.attn_q.bias", "F32", 63)),
    "rotary factors of another length": TinyModel(tensors=_tensor("rope_freqs.weight", "F32", 5)),
}

HARMLESS = frozenset(
    {
        "bpe with a token of invalid UTF-8",
        "bpe split at spaces",
        "bpe of nucleotides",
        "a number for the chat template",
        "a scaling factor of zero",
        "a yarn of no context",
        "another number of tokens",
        "a clamp that is no number",
    }
)
"""Defects that llama.cpp accepts."""
ENDLESS = TinyModel("rwkv", _tokens("rwkv", {1 + i: f"\\x{i:02x}and more" for i in range(256)}))
"""A vocabulary whose tokens make llama.cpp loop forever and allocate memory."""

EACH_PLACE = (
    "spm without bytes",
    "spm without the byte 0",
    "spm whose byte token ends early",
    "spm, two tokens that differ behind a zero",
    "bpe that adds a start it has not",
    "bpe with an unknown pre-tokenizer",
    "bpe whose pre-tokenizer is of words",
    "wpm with byte tokens",
    "ugm with a table that leads nowhere",
    "ugm with a very long token",
    "rwkv without a token for the unknown",
    "plamo2 without bytes",
    "no vocabulary",
    "no tokens in use",
    "more experts than llama.cpp counts",
    "a scaling that nobody knows",
    "a rotation in sections of no length",
    "no output norm",
    "a norm in half precision",
    "a head in a format of activations",
    "a tensor that nobody knows",
)
"""One case for each place where a defect is found: by us in the header, by llama.cpp while loading,
or by its abort while it loads, builds a graph, computes or tokenizes."""

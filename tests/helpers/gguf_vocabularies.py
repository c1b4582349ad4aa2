"""Tiny GGUF models with a healthy vocabulary of each kind, and models broken in one way each.

Of what llama.cpp and ggml throw or abort on: as they read a header and a vocabulary, as they build
a graph, as a text is tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf_bytes as gb

Metadata = dict[str, tuple[str, Any]]
N_TOKENS = 320
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_T = "tokenizer.ggml."


def _spm() -> list[str]:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
    return [*special, *(f"\u2581{chr(97 + i)}" for i in range(26)), "the", "\u2581the"]


def _byte_characters() -> list[str]:
    """Of byte-level BPE: printable bytes are themselves, others come after U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    return [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]


def _bpe() -> list[str]:
    return ["<|endoftext|>", *_byte_characters(), "th", "the"]


def _wpm() -> list[str]:
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"\u2581{chr(97 + i)}" for i in range(26))]


def _ugm() -> list[str]:
    return ["<pad>", "</s>", "<unk>", "\u2581", *(chr(97 + i) for i in range(26)), "\u2581the"]


def _rwkv() -> list[str]:
    return ["<s>", *(f"\\x{i:02x}" for i in range(256)), "the"]


_LISTS = {"spm": _spm, "bpe": _bpe, "wpm": _wpm, "ugm": _ugm, "rwkv": _rwkv}
_MODELS = {"spm": "llama", "bpe": "gpt2", "wpm": "bert", "ugm": "t5", "rwkv": "rwkv"}
_IDS = {
    "spm": {"bos": 1, "eos": 2, "unknown": 0},
    "bpe": {"bos": 0, "eos": 0},
    "wpm": {"bos": 2, "eos": 3, "unknown": 1, "seperator": 3, "padding": 0, "mask": 4},
    "ugm": {"eos": 1, "unknown": 2, "padding": 0},
    "rwkv": {"bos": 0, "eos": 0, "unknown": 0},
}
KINDS = tuple(_LISTS)


def vocabulary(kind: str) -> Metadata:
    """All keys of a healthy one of N_TOKENS tokens."""
    tokens = _LISTS[kind]()
    tokens += [f"filler{i}" for i in range(N_TOKENS - len(tokens))]
    types = [BYTE if token.startswith("<0x") else NORMAL for token in tokens]
    n_special = {"spm": 3, "bpe": 1, "wpm": 5, "ugm": 3, "rwkv": 1}[kind]
    types[:n_special] = [CONTROL] * n_special
    made: Metadata = {
        f"{_T}model": ("str", _MODELS[kind]),
        f"{_T}tokens": ("[str]", tokens),
        f"{_T}token_type": ("[i32]", types),
        f"{_T}scores": ("[f32]", [-float(i) for i in range(N_TOKENS)]),
    }
    if kind == "bpe":
        made |= {f"{_T}pre": ("str", "gpt-2"), f"{_T}merges": ("[str]", ["t h", "th e"])}
    made |= {f"{_T}{role}_token_id": ("u32", i) for role, i in _IDS[kind].items()}
    return made


@dataclass(frozen=True)
class TinyModel:
    """A vocabulary of a kind, or of none, with changes; None drops a key or a tensor."""

    kind: str = "bpe"
    changes: Mapping[str, tuple[str, Any] | None] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, tuple[int, ...]] | None] = field(default_factory=dict)
    architecture: str = "llama"

    def write(self, path: Path) -> Path:
        metadata = gb.model_metadata(self.architecture)
        metadata = {key: item for key, item in metadata.items() if not key.startswith(_T)}
        metadata |= vocabulary(self.kind)
        rows = ("F32", (N_TOKENS, gb.HIDDEN))
        tensors = gb.model_tensors() | {"token_embd.weight": rows, "output.weight": rows}
        return gb.write_model(path, _with(metadata, self.changes), _with(tensors, self.tensors))


def _with(healthy: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**healthy, **changes}
    return {key: item for key, item in changed.items() if item is not None}


def _tokens(kind: str, changes: Mapping[int, str | bytes]) -> Metadata:
    """The list of tokens with others at some places."""
    tokens = list(vocabulary(kind)[f"{_T}tokens"][1])
    for at, token in changes.items():
        tokens[at] = token
    return {f"{_T}tokens": ("[str]", tokens)}


def _types(kind: str, changes: Mapping[int, int]) -> Metadata:
    types = list(vocabulary(kind)[f"{_T}token_type"][1])
    for at, its_type in changes.items():
        types[at] = its_type
    return {f"{_T}token_type": ("[i32]", types)}


def _key(name: str, kind: str, value: Any) -> Metadata:
    return {f"{_T}{name}": (kind, value)}


def _figure(name: str, kind: str, value: Any) -> Metadata:
    return {f"llama.{name}": (kind, value)}


def _tensor(name: str, kind: str, *shape: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (kind, shape)}


def _ids(**ids: int) -> Metadata:
    return {f"{_T}{role}_token_id": ("u32", i) for role, i in ids.items()}


_ADD = {f"{_T}add_bos_token": ("bool", True)}
_SPM_BYTES = {3 + i: f"no byte {i}" for i in range(256)}

BROKEN: dict[str, TinyModel] = {
    # SPM: what is no token is spelled in bytes.
    "spm without bytes": TinyModel("spm", _tokens("spm", _SPM_BYTES)),
    "spm without one byte": TinyModel("spm", _tokens("spm", {3 + 0xE4: "x"})),
    "spm without the byte 0": TinyModel("spm", _tokens("spm", {3: "\0"})),
    "spm with bytes in small letters": TinyModel(
        "spm", _tokens("spm", {3 + i: f"<0x{i:02x}>" for i in range(0xA0, 0xB0)})
    ),
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
    "spm without an end that it adds": TinyModel(
        "spm", _key("add_eos_token", "bool", True) | _ids(eos=2) | {"tokenizer.ggml.x": ("u32", 1)}
    ),
    "spm named phi3 without </s>": TinyModel(
        "spm", _tokens("spm", {2: "end"}) | {"general.name": ("str", "phi3")}
    ),
    # BPE
    "bpe without merges": TinyModel("bpe", {f"{_T}merges": None}),
    "bpe with merges of numbers": TinyModel("bpe", _key("merges", "[u32]", [1, 2])),
    "bpe with an unknown pre-tokenizer": TinyModel("bpe", _key("pre", "str", "nobody's")),
    "bpe that adds a start it has not": TinyModel(
        "bpe", _ADD | _key("model", "str", "gemma4") | {f"{_T}bos_token_id": None}
    ),
    "bpe with byte tokens of one letter": TinyModel(
        "bpe", _types("bpe", {300: BYTE}) | _tokens("bpe", {300: "b"[:0] + "q1"})
    ),
    "bpe with a token of invalid UTF-8": TinyModel("bpe", _tokens("bpe", {300: b"\xff\xfe"})),
    "bpe with a token beyond Unicode": TinyModel("bpe", _tokens("bpe", {300: b"\xf7\xbf\xbf\xbf"})),
    "bpe whose pre-tokenizer is a number": TinyModel("bpe", _key("pre", "u32", 7)),
    "bpe split at spaces": TinyModel(
        "bpe", _key("model", "str", "whitespace") | _key("pre", "str", "whitespace")
    ),
    "bpe of nucleotides": TinyModel(
        "bpe", _key("model", "str", "hybriddna") | _key("pre", "str", "default")
    ),
    # WPM
    "wpm without its start": TinyModel("wpm", _ids(bos=999) | _tokens("wpm", {}) ),
    "wpm with byte tokens": TinyModel("wpm", _types("wpm", {300: BYTE})),
    "wpm without a token for the unknown": TinyModel("wpm", {f"{_T}unknown_token_id": None}),
    # UGM
    "ugm without a token for the unknown": TinyModel("ugm", _ids(unknown=2**32 - 1)),
    "ugm that adds a start it has not": TinyModel("ugm", _ADD),
    "ugm with a table that is too short": TinyModel(
        "ugm", _key("precompiled_charsmap", "[i8]", [0, 0])
    ),
    "ugm with a table larger than its bytes": TinyModel(
        "ugm", _key("precompiled_charsmap", "[i8]", [127, 0, 0, 0, 1])
    ),
    "ugm with a table that leads nowhere": TinyModel(
        "ugm", _key("precompiled_charsmap", "[u8]", [4, 0, 0, 0, 0, 252, 255, 127, 0])
    ),
    "ugm with a table of texts": TinyModel("ugm", _key("precompiled_charsmap", "[str]", ["x"])),
    "ugm with a very long token": TinyModel("ugm", _tokens("ugm", {300: "x" * 500_000})),
    # RWKV
    "rwkv without single bytes": TinyModel(
        "rwkv", _tokens("rwkv", {1 + i: f"\\x{i:02x}and more" for i in range(256)})
    ),
    "rwkv without a token for the unknown": TinyModel(
        "rwkv", {f"{_T}unknown_token_id": None} | _tokens("rwkv", {1 + ord("~"): "xyz"})
    ),
    "rwkv without a line break": TinyModel(
        "rwkv", {f"{_T}unknown_token_id": None} | _tokens("rwkv", {1 + 10: "xyz"})
    ),
    # Of any kind
    "plamo2 without bytes": TinyModel("spm", _key("model", "str", "plamo2") | _types("spm", {3: NORMAL})),
    "an unknown kind": TinyModel("spm", _key("model", "str", "nobody's")),
    "no kind": TinyModel("spm", {f"{_T}model": None}),
    "no vocabulary": TinyModel("spm", _key("model", "str", "no_vocab")),
    "no tokens": TinyModel("bpe", {f"{_T}tokens": None}),
    "a number for tokens": TinyModel("bpe", _key("tokens", "u32", 5)),
    "numbers for tokens": TinyModel("bpe", _key("tokens", "[u32]", [5] * N_TOKENS)),
    "too few scores": TinyModel("spm", _key("scores", "[f32]", [0.5])),
    "scores of texts": TinyModel("spm", _key("scores", "[str]", ["1"] * N_TOKENS)),
    "too few types": TinyModel("spm", _key("token_type", "[i32]", [1])),
    "types of floats": TinyModel("spm", _key("token_type", "[f32]", [1.0] * N_TOKENS)),
    "suppressed tokens of texts": TinyModel("bpe", _key("suppress_tokens", "[str]", ["1"])),
    "a text for an id": TinyModel("bpe", {f"{_T}eos_token_id": ("str", "2")}),
    "a list for an id": TinyModel("bpe", {f"{_T}eos_token_id": ("[u32]", [2])}),
    "a text for a flag": TinyModel("bpe", _key("add_bos_token", "str", "yes")),
    "a number for the name": TinyModel("bpe", {"general.name": ("u32", 5)}),
    "a number for the chat template": TinyModel("bpe", {"tokenizer.chat_template": ("u32", 5)}),
    # Figures
    "more groups than heads": TinyModel(changes=_figure("attention.head_count_kv", "u32", 3)),
    "no heads": TinyModel(changes=_figure("attention.head_count", "u32", 0)),
    "odd rotation": TinyModel(changes=_figure("rope.dimension_count", "u32", 15)),
    "more rotated than there is": TinyModel(changes=_figure("rope.dimension_count", "u32", 64)),
    "a scaling that nobody knows": TinyModel(changes=_figure("rope.scaling.type", "str", "odd")),
    "a scaling factor of zero": TinyModel(
        changes=_figure("rope.scaling.type", "str", "yarn") | _figure("rope.scaling.factor", "f32", 0.0)
    ),
    "a scaling factor that is no number": TinyModel(
        changes=_figure("rope.scaling.type", "str", "linear")
        | _figure("rope.scaling.factor", "f32", float("nan"))
    ),
    "a yarn of no context": TinyModel(
        changes=_figure("rope.scaling.type", "str", "yarn")
        | _figure("rope.scaling.original_context_length", "u32", 0)
    ),
    "keys of another length": TinyModel(changes=_figure("attention.key_length", "u32", 24)),
    "values of another length": TinyModel(changes=_figure("attention.value_length", "u32", 24)),
    "a list for the feed-forward length": TinyModel(
        changes=_figure("feed_forward_length", "[u32]", [1, 2, 3])
    ),
    "a feed-forward length of text": TinyModel(changes=_figure("feed_forward_length", "str", "x")),
    "another feed-forward length": TinyModel(changes=_figure("feed_forward_length", "u32", 77)),
    "experts without tensors": TinyModel(
        changes=_figure("expert_count", "u32", 4) | _figure("expert_used_count", "u32", 2)
    ),
    "more experts than llama.cpp counts": TinyModel(
        changes=_figure("expert_count", "u32", 5000) | _figure("expert_used_count", "u32", 2)
    ),
    "another number of tokens": TinyModel(changes=_figure("vocab_size", "u32", 7)),
    "a number of tokens that is a text": TinyModel(changes=_figure("vocab_size", "str", "7")),
    "an unknown architecture": TinyModel(architecture="nobody"),
    "a quantisation that nobody knows": TinyModel(changes={"general.file_type": ("str", "x")}),
    "a clamp that is no number": TinyModel(
        changes=_figure("attention.clamp_kqv", "f32", float("nan"))
    ),
    # Tensors
    "no output norm": TinyModel(tensors={"output_norm.weight": None}),
    "no query": TinyModel(tensors={"blk.1.attn_q.weight": None}),
    "a norm of another length": TinyModel(tensors=_tensor("blk.0.attn_norm.weight", "F32", 32)),
    "a norm in half precision": TinyModel(tensors=_tensor("blk.0.attn_norm.weight", "F16", 64)),
    "a query of another shape": TinyModel(tensors=_tensor("blk.0.attn_q.weight", "F32", 64, 32)),
    "a query of one dimension": TinyModel(tensors=_tensor("blk.0.attn_q.weight", "F32", 64)),
    "a query of whole numbers": TinyModel(tensors=_tensor("blk.0.attn_q.weight", "I32", 64, 64)),
    "a query in a format of activations": TinyModel(
        tensors=_tensor("blk.0.attn_q.weight", "Q8_1", 64, 64)
    ),
    "an embedding in a format of activations": TinyModel(
        tensors=_tensor("token_embd.weight", "Q8_1", N_TOKENS, 64)
    ),
    "a head in a format of activations": TinyModel(
        tensors=_tensor("output.weight", "Q8_1", N_TOKENS, 64)
    ),
    "a head of other rows": TinyModel(tensors=_tensor("output.weight", "F32", N_TOKENS - 1, 64)),
    "a tensor that nobody knows": TinyModel(tensors=_tensor("blk.0.nobody.weight", "F32", 64, 64)),
    "a bias of another length": TinyModel(tensors=_tensor("blk.0.attn_q.bias", "F32", 63)),
    "rotary factors of another length": TinyModel(tensors=_tensor("rope_freqs.weight", "F32", 5)),
    "rotary factors of two dimensions": TinyModel(tensors=_tensor("rope_freqs.weight", "F32", 2, 8)),
}

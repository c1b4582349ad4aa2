"""Tiny GGUF models of random weights with a valid vocabulary of each kind, byte by byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf_bytes as gb

Metadata = dict[str, tuple[str, Any]]
N_TOKENS = 320
NORMAL, CONTROL, UNUSED, BYTE = 1, 3, 5, 6
TOKENIZER = "tokenizer.ggml."


def _spm() -> list[str]:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
    return [*special, *(f"\u2581{chr(97 + i)}" for i in range(26)), "the", "\u2581the"]


def _byte_characters() -> list[str]:
    """Letters of byte-level BPE: printable bytes are themselves, others come after U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [i for i in range(256) if i not in printable]
    return [*map(chr, printable), *(chr(256 + i) for i in range(len(rest)))]


def _bpe() -> list[str]:
    return ["<|endoftext|>", *_byte_characters(), "th", "the"]


def _wpm() -> list[str]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return [*special, *(f"\u2581{chr(97 + i)}" for i in range(26))]


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
    """Return all keys of a valid vocabulary of N_TOKENS tokens."""
    tokens = _LISTS[kind]()
    tokens += [f"filler{i}" for i in range(N_TOKENS - len(tokens))]
    types = [BYTE if token.startswith("<0x") else NORMAL for token in tokens]
    n_special = {"spm": 3, "bpe": 1, "wpm": 5, "ugm": 3, "rwkv": 1}[kind]
    types[:n_special] = [CONTROL] * n_special
    made: Metadata = {
        f"{TOKENIZER}model": ("str", _MODELS[kind]),
        f"{TOKENIZER}tokens": ("[str]", tokens),
        f"{TOKENIZER}token_type": ("[i32]", types),
        f"{TOKENIZER}scores": ("[f32]", [-float(i) for i in range(N_TOKENS)]),
    }
    if kind == "bpe":
        made |= {
            f"{TOKENIZER}pre": ("str", "gpt-2"),
            f"{TOKENIZER}merges": ("[str]", ["t h", "th e"]),
        }
    made |= {f"{TOKENIZER}{role}_token_id": ("u32", i) for role, i in _IDS[kind].items()}
    return made


@dataclass(frozen=True)
class TinyModel:
    """A vocabulary of a kind, or none, with changes; None drops a key or a tensor."""

    kind: str = "bpe"
    changes: Mapping[str, tuple[str, Any] | None] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, tuple[int, ...]] | None] = field(default_factory=dict)
    architecture: str = "llama"

    def write(self, path: Path) -> Path:
        metadata = gb.model_metadata(self.architecture)
        metadata = {key: item for key, item in metadata.items() if not key.startswith(TOKENIZER)}
        metadata |= vocabulary(self.kind)
        rows = ("F32", (N_TOKENS, gb.HIDDEN))
        tensors = gb.model_tensors() | {"token_embd.weight": rows, "output.weight": rows}
        return gb.write_model(path, _with(metadata, self.changes), _with(tensors, self.tensors))


def _with(healthy: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**healthy, **changes}
    return {key: item for key, item in changed.items() if item is not None}

"""Refused GGUF headers: other kinds of models, impossible values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import gguf_bytes as gb
import pytest
from gguf_loading import load, refused

from backends.contract.backend import UnsupportedModel
from backends.gguf import kinds
from backends.gguf import model as gguf_model


@pytest.mark.parametrize("architecture", sorted(kinds.REFUSED))
def test_architectures_refused_by_name(tmp_path: Path, architecture: str) -> None:
    refused(
        tmp_path,
        rf"\({architecture}\) is a",
        gb.model_metadata(architecture),
        error=UnsupportedModel,
    )


def test_other_kinds_of_files(tmp_path: Path) -> None:
    for kind, match in (("adapter", "LoRA"), ("mmproj", "projector"), ("imatrix", "importance")):
        metadata = {"general.type": ("str", kind)} | gb.model_metadata()
        refused(tmp_path, match, metadata, error=UnsupportedModel)
    load(tmp_path, {"general.type": ("str", "model")} | gb.model_metadata())
    causal = gb.model_metadata("qwen3", attention__causal=("bool", False))
    refused(tmp_path, "encoder", causal, error=UnsupportedModel)
    causal = gb.model_metadata("qwen3", attention__causal=("bool", True))
    assert load(tmp_path, causal).architecture == "qwen3"
    loops = gb.model_metadata("new", num_loops=("u32", 2))
    refused(tmp_path, "several times per token", loops, error=UnsupportedModel)
    refused(tmp_path, "names no general.architecture", {"a": ("u8", 1)})
    for item in (("u32", 5), ("str", ""), ("str", "x" * 65), ("str", "a\nb"), ("[str]", ["llama"])):
        metadata = gb.model_metadata() | {"general.architecture": item}
        refused(tmp_path, "names no general.architecture", metadata)


RANGES = {
    "block_count": [0, 1025, 10**9, 2**64 - 1],
    "context_length": [0, 2**31, 2**64 - 1],
    "embedding_length": [0, 2**20 + 1, 2**64 - 1],
    "attention__head_count": [2**14 + 1, 2**64 - 1],
    "attention__head_count_kv": [2**14 + 1, 2**64 - 1],
    "attention__key_length": [0, 2**14 + 1],
    "attention__value_length": [0, 2**14 + 1],
    "expert_count": [2**14 + 1],
    "attention__sliding_window": [2**31],
    "nextn_predict_layers": [2, 2**64 - 1],
    "attention__shared_kv_layers": [2],
    "attention__indexer__key_length": [2**14 + 1],
}


@pytest.mark.parametrize(("n_used", "n_experts"), [(65, 64), (0, 64), (4, 0)])
def test_experts_of_a_token_that_are_not_among_all_experts(
    tmp_path: Path, n_used: int, n_experts: int
) -> None:
    """llama.cpp ends the process at such a header."""
    counts = {"expert_count": ("u32", n_experts), "expert_used_count": ("u32", n_used)}
    metadata = gb.model_metadata("qwen3moe", **counts)
    match = f"expert_count of {n_experts} and qwen3moe.expert_used_count of {n_used}: .* 1 or more"
    refused(tmp_path, match, metadata)
    del metadata["qwen3moe.expert_used_count"]
    if n_experts:
        refused(tmp_path, "expert_used_count missing", metadata)


def test_a_stack_of_another_number_of_experts(tmp_path: Path) -> None:
    counts = {"expert_count": ("u32", 5), "expert_used_count": ("u32", 2)}
    stack = {"blk.1.ffn_up_exps.weight": ("F32", (4, 8, gb.HIDDEN))}
    match = r"'blk.1.ffn_up_exps.weight' of 4 experts, but qwen3moe.expert_count is 5"
    metadata = gb.model_metadata("qwen3moe", **counts)
    refused(tmp_path, match, metadata, gb.model_tensors() | stack)


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("blk.0.attn_v.weight", "I16", "in I16, and weights are floats"),
        ("token_embd.weight", "F64", "in F64, and weights are"),
        ("output.weight", "Q8_1", "in Q8_1, and weights are"),
        ("blk.1.ffn_norm.weight", "I32", "in I32, and norms and biases are F32"),
        ("output_norm.weight", "F16", "in F16, and norms and biases are F32"),
        ("blk.1.attn_q.bias", "BF16", "in BF16, and norms and biases are F32"),
    ],
)
def test_numbers_that_llama_cpp_ends_the_process_at(
    tmp_path: Path, name: str, kind: str, match: str
) -> None:
    tensors = gb.model_tensors()
    shape = tensors[name][1] if name in tensors else (gb.HIDDEN,)
    refused(tmp_path, match, None, tensors | {name: (kind, shape)})


@pytest.mark.parametrize("n_rotated", [0, 8, 15, 17, 64])
def test_heads_that_are_rotated_in_part(tmp_path: Path, n_rotated: int) -> None:
    """llama.cpp ends the process, except for families that do rotate a part."""
    count = {"rope__dimension_count": ("u32", n_rotated)}
    match = f"rope.dimension_count of {n_rotated}; 16 is accepted"
    refused(tmp_path, match, gb.model_metadata("qwen3", **count))
    assert load(tmp_path, gb.model_metadata("phi3", **count)).architecture == "phi3"


@pytest.mark.parametrize("base", [0.0, -1.0, float("nan"), float("inf")])
def test_a_base_of_rotations_that_is_none(tmp_path: Path, base: float) -> None:
    metadata = gb.model_metadata(rope__freq_base=("f32", base))
    refused(tmp_path, "rope.freq_base of .* which is no number above 0", metadata)


def test_more_experts_per_token_than_fit_a_graph(tmp_path: Path) -> None:
    """llama.cpp ends the process while it builds the graph."""

    def taking(n_used: int) -> dict[str, tuple[str, object]]:
        counts = {"expert_count": ("u32", 256), "expert_used_count": ("u32", n_used)}
        return gb.model_metadata("qwen3moe", **counts)

    assert load(tmp_path, taking(220)).n_experts_used == 220
    match = "takes 221 experts.* at most 220 in 2 layers"
    refused(tmp_path, match, taking(221), error=UnsupportedModel)


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, vs in RANGES.items() for v in vs])
def test_values_out_of_range(tmp_path: Path, key: str, value: int) -> None:
    metadata = gb.model_metadata(**{key: ("u64", value)})
    name = f"llama.{key.replace('__', '.')}"
    refused(tmp_path, rf"{name} of {value}; \d+ to \d+ are accepted", metadata)


@pytest.mark.parametrize("key", RANGES)
def test_values_of_a_wrong_type(tmp_path: Path, key: str) -> None:
    for item in (("str", "2"), ("f32", 2.0), ("i32", -1)):
        refused(tmp_path, "are accepted", gb.model_metadata(**{key: item}))
    by_layer = key.startswith("attention__head_count")
    match = "3 values in .* for 2 layers" if by_layer else "a list in"
    refused(tmp_path, match, gb.model_metadata(**{key: ("[u32]", [1, 1, 1])}))
    if by_layer:
        refused(tmp_path, "accepted", gb.model_metadata(**{key: ("[i32]", [4, -1])}))
        refused(tmp_path, "accepted", gb.model_metadata(**{key: ("[str]", ["4", "4"])}))


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "attention__head_count"]
)
def test_missing_values(tmp_path: Path, key: str) -> None:
    name = f"llama.{key.replace('__', '.')}"
    refused(tmp_path, f"has no {name}: it is no complete model", gb.model_metadata(**{key: None}))


def test_head_counts_that_make_no_sense(tmp_path: Path) -> None:
    zero = ("u32", 0)
    refused(tmp_path, "head_count of 0", gb.model_metadata(attention__head_count=zero))
    zeros = gb.model_metadata(attention__head_count=("[u32]", [0, 0]))
    refused(tmp_path, "head_count of 0", zeros)
    for n_kv in (3, 8):
        metadata = gb.model_metadata(attention__head_count_kv=("u32", n_kv))
        refused(tmp_path, f"4 attention heads for {n_kv} .* layer 0, not a multiple", metadata)
    metadata = gb.model_metadata(attention__head_count=("u32", 128))
    refused(tmp_path, "more attention heads than the hidden size", metadata)


def test_tensors_and_values_that_disagree(tmp_path: Path) -> None:
    def changed(**shapes: tuple[int, ...] | None) -> dict:
        tensors = gb.model_tensors()
        for name, shape in shapes.items():
            tensors.pop(f"{name}.weight")
            if shape is not None:
                tensors[f"{name}.weight"] = ("F32", shape)
        return tensors

    refused(tmp_path, "has no token_embd.weight", tensors=changed(token_embd=None))
    wrong = changed(token_embd=(gb.VOCAB, 32))
    refused(tmp_path, r"token_embd.weight of shape \(96, 32\) for a hidden size of 64", None, wrong)
    refused(tmp_path, "token_embd.weight of shape", None, changed(token_embd=(gb.VOCAB,)))
    refused(tmp_path, "head of shape", None, changed(output=(gb.VOCAB - 1, gb.HIDDEN)))
    metadata = gb.model_metadata()
    metadata["tokenizer.ggml.tokens"] = ("[str]", ["a"] * 95)
    refused(tmp_path, "lists 95 tokens but has 96 embeddings", metadata)

    refused(tmp_path, r"holds 'blk\.2\..*block_count is 2", None, gb.model_tensors(3))
    four = gb.model_metadata(block_count=("u32", 4))
    refused(tmp_path, r"no tensors of 2 of its 4 layers \(blk\.2 is the first", four)
    only_one = {k: v for k, v in gb.model_tensors().items() if not k.startswith("blk.0.")}
    refused(tmp_path, r"no tensors of 1 of its 2 layers \(blk\.0", None, only_one)


NAMES = [f"t{i}" for i in range(gb.VOCAB)]
VOCABULARIES: list[tuple[dict, str]] = [
    ({"tokens": ("[str]", [*NAMES[:-1], "t0"])}, "lists the token 't0' 2 times"),
    (
        {"tokens": ("[u32]", [5] * gb.VOCAB)},
        r"has arr\[u32\] in tokenizer.ggml.tokens, not strings",
    ),
    ({"merges": ("[u32]", [5])}, r"has arr\[u32\] in tokenizer.ggml.merges, not strings"),
    ({"scores": ("[f32]", [0.5])}, "has 1 values in tokenizer.ggml.scores for 96 tokens"),
    ({"token_type": ("i32", 1)}, "has 1 values in tokenizer.ggml.token_type for 96 tokens"),
]


@pytest.mark.parametrize(("lists", "match"), VOCABULARIES, ids=[match for _, match in VOCABULARIES])
def test_vocabularies_for_which_llama_cpp_would_end_the_process(
    tmp_path: Path, lists: dict, match: str
) -> None:
    changes = {f"tokenizer.ggml.{name}": item for name, item in lists.items()}
    refused(tmp_path, f"{match}.*download it again", gb.model_metadata() | changes)


@pytest.mark.parametrize(
    ("units", "sequences", "is_well"),
    [
        ({}, b"x\0", True),
        ({0x61: 1 << 10 | 1 << 8 | 0x61, 0x60: 1 << 31}, b"x\0", True),  # "a" is written as "x"
        ({0: 256 << 10}, b"x\0", False),
        ({0: 1 << 31}, b"x\0", False),
        ({0x61: 7 << 10 | 1 << 9 | 0x61}, b"x\0", False),  # 7 << 8
        ({0x61: 1 << 10 | 1 << 8 | 0x61, 0x60: 1 << 31 | 2}, b"x\0", False),
        ({}, b"x", False),
    ],
)
def test_tables_of_characters(
    tmp_path: Path, units: dict[int, int], sequences: bytes, is_well: bool
) -> None:
    values = [units.get(i, 0) for i in range(256)]
    table = struct.pack("<257I", 4 * 256, *values) + sequences
    key = {"tokenizer.ggml.precompiled_charsmap": ("[u8]", list(table))}
    if is_well:
        assert load(tmp_path, gb.model_metadata() | key)
    else:
        refused(tmp_path, "leads outside of itself.*download it again", gb.model_metadata() | key)


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        (range(256), "255 of 256 bytes .<0x00> is the first"),
        ([0], "1 of 256 bytes .<0x00>"),
        ([0xE4, 0xFF], "2 of 256 bytes .<0xE4>"),
        ([0x61], None),  # it has the token "a"
    ],
)
def test_vocabularies_of_sentencepiece_that_cannot_spell(
    tmp_path: Path, missing: Sequence[int], match: str | None
) -> None:
    bytes_ = [f"<0x{i:02X}>" if i not in missing else f"none{i}" for i in range(256)]
    lists = {"model": ("str", "llama"), "tokens": ("[str]", [*bytes_, "a"])}
    metadata = gb.model_metadata() | {f"tokenizer.ggml.{name}": x for name, x in lists.items()}
    rows = ("F32", (257, gb.HIDDEN))
    tensors = gb.model_tensors() | {"token_embd.weight": rows, "output.weight": rows}
    if match is None:
        assert load(tmp_path, metadata, tensors).vocab_size == 257
    else:
        refused(tmp_path, match, metadata, tensors)


def test_tokens_without_a_text_may_be_several(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.tokens": ("[str]", ["", "", *NAMES[2:]])}
    assert load(tmp_path, gb.model_metadata() | tokens).vocab_size == gb.VOCAB


@pytest.mark.parametrize("value", [-1e-5, float("nan"), float("inf")])
def test_norms_for_which_llama_cpp_would_end_the_process(tmp_path: Path, value: float) -> None:
    epsilon = {"llama.attention.layer_norm_rms_epsilon": ("f32", value)}
    refused(tmp_path, "no number of at least 0", gb.model_metadata() | epsilon)


@pytest.mark.gguf
def test_the_names_are_those_of_llama_cpp() -> None:
    package = pytest.importorskip("llama_cpp")
    library = Path(package.__file__).parent / "lib" / "libllama.so"
    if not library.exists():
        pytest.skip(f"no {library}")
    content = library.read_bytes()
    names = {*kinds.REFUSED, *gguf_model._RECURRENT, *gguf_model._HYBRID}
    assert [name for name in sorted(names) if name.encode() + b"\0" not in content] == []

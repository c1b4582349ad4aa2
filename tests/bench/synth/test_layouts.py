"""Grown quantised checkpoints equal other libraries' results, within their bits' precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from forced_streaming import force_streaming
from grown_models import (
    altered,
    assert_same_function,
    logits_of,
    save_source_with_tokenizer,
)
from plain_forms import dequantise
from reference_decoding import N_TOKENS, config_of, generate
from safetensors.torch import load_file

import specdec
from bench.commands.app import main
from bench.synth.checkpoint import grow
from bench.synth.layouts import LAYOUTS
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.sizing import choose_shape

# Groups of 128 weights of the small model also fit the large one; a norm's scale is a half.
SMALL = LlamaShape(128, 128, 2, 1, 1, 128, 280, tied=False)
LARGE = LlamaShape(512, 384, 5, 4, 2, 128, 280, tied=False)
PROMPTS = ([70, 80, 90, 100, 70, 80], [5, 9, 44, 3], [200, 17, 33])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source_with_tokenizer(tmp_path_factory.mktemp("small"), SMALL, seed=4)


@pytest.fixture(scope="module", params=["fp8", "int4"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def grown(source: Path, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised checkpoint in several files; its bf16 form lies beside it as "plain"."""
    folder = tmp_path_factory.mktemp(dtype)
    out = grow(source, folder / "grown", LARGE, dtype=dtype, shard_bytes=1_000_000).path
    dequantise(out, folder / "plain")
    return out


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def outputs_of(folder: Path) -> list[list[int]]:
    with specdec.load(folder, ctx_size=64) as llm:
        options = {"max_tokens": N_TOKENS, "ignore_eos": True}
        return [list(llm.generate(prompt, **options).token_ids) for prompt in PROMPTS]


@pytest.mark.slow
def test_it_computes_what_its_bf16_form_does(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resident, plain = outputs_of(grown), outputs_of(grown.parent / "plain")
    force_streaming(monkeypatch)
    assert resident == plain == outputs_of(grown)


@pytest.mark.slow_except(1)
def test_its_text_is_transformers_on_the_dequantised_weights(grown: Path, tmp_path: Path) -> None:
    """The comparison is in float32: in bf16 the two round sums in different places."""
    from transformers import AutoModelForCausalLM

    wide = shutil.copytree(grown, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    dequantise(wide, tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    greedy = config_of({"eos_token_id": None})
    expected = [generate(plain, greedy, prompt)[0] for prompt in PROMPTS]
    assert len({token for text in expected for token in text}) > 20  # otherwise it would say little
    assert outputs_of(wide) == expected


def test_growing_adds_nothing_to_what_rounding_changes(
    source: Path, grown: Path, dtype: str, tmp_path: Path
) -> None:
    """Ungrown, the small model has the same rounded weights."""
    rounded = grow(source, tmp_path / "rounded", SMALL, dtype=dtype).path
    dequantise(rounded, tmp_path / "plain")
    assert_same_function(tmp_path / "plain", grown.parent / "plain", SMALL.vocab_size)
    assert not torch.equal(logits_of(tmp_path / "plain"), logits_of(source))


def test_weights_are_as_near_as_their_bits(source: Path, dtype: str, tmp_path: Path) -> None:
    """fp8 has three bits behind the leading one, so the error is at most a sixteenth of the weight.
    int4 has steps of (largest of a group) / 7.5, so the error is half a step, plus 7.5 / 256 of a
    step each for the scale and the product, which are rounded to bf16."""
    grow(source, tmp_path / "rounded", SMALL, dtype=dtype)
    dequantise(tmp_path / "rounded", tmp_path / "plain")
    expected, actual = weights_of(source), weights_of(tmp_path / "plain")
    assert expected.keys() == actual.keys()
    for name, weight in expected.items():
        error = (actual[name].float() - weight).abs()
        if "proj" not in name:
            assert torch.equal(actual[name], weight.bfloat16())
        elif dtype == "fp8":
            # Below the smallest normal number the step is constant. The last term is bf16's.
            smallest = weight.abs().max() / 448 * 2**-6
            assert (error <= weight.abs().clamp(min=smallest) * (2**-4 + 2**-8)).all()
        else:
            step = weight.abs().unflatten(1, (-1, 128)).amax(-1, keepdim=True) / 7.5
            assert (error.unflatten(1, (-1, 128)) <= step * (0.5 + 15 * 2**-8)).all()


def test_zeros_stay_zeros(grown: Path) -> None:
    weights = weights_of(grown.parent / "plain")
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert not weights[f"model.layers.0.{name}"][SMALL.hidden_size :].any()
        assert not weights[f"model.layers.1.{name}"].any()  # from an added layer


def test_the_files_are_as_other_libraries_write_them(grown: Path, dtype: str) -> None:
    weights = weights_of(grown)
    names = {
        "fp8": {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
        "int4": {
            "weight_packed": torch.int32,
            "weight_scale": torch.bfloat16,
            "weight_shape": torch.int64,
        },
    }[dtype]
    module = "model.layers.4.mlp.down_proj."
    parts = {name.removeprefix(module): t for name, t in weights.items() if module in name}
    assert {suffix: part.dtype for suffix, part in parts.items()} == names
    if dtype == "int4":
        assert parts["weight_shape"].tolist() == [LARGE.hidden_size, LARGE.intermediate_size]
    quantised = ("_proj.weight", "_proj.weight_packed", "_scale_inv", "_scale", "_shape")
    rest = {t.dtype for name, t in weights.items() if not name.endswith(quantised)}
    assert rest == {torch.bfloat16}
    config = json.loads((grown / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    method = {"fp8": "fp8", "int4": "compressed-tensors"}[dtype]
    assert config["quantization_config"]["quant_method"] == method
    index = json.loads((grown / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())


def test_transformers_dequantises_it_to_the_same_weights(grown: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    if dtype == "int4":
        pytest.importorskip("compressed_tensors")
    kind = {"fp8": FineGrainedFP8Config, "int4": CompressedTensorsConfig}[dtype]
    options = {"dtype": torch.bfloat16, "quantization_config": kind(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(grown, **options).state_dict()
    own = weights_of(grown.parent / "plain")
    assert all(torch.equal(theirs[name], weight) for name, weight in own.items())


@pytest.mark.parametrize("n_bytes", [1_000_000_000, 2_500_000_000, 6_000_000_000])
def test_a_size_is_that_of_the_files(dtype: str, n_bytes: int) -> None:
    target = LlamaShape(384, 1024, 6, 3, 3, 128, 4096, tied=True)
    shape = choose_shape(target, None, n_bytes, 32_000, LAYOUTS[dtype])
    actual = LAYOUTS[dtype].model_bytes(shape.with_head_dim(128))
    assert actual == pytest.approx(n_bytes, rel=0.02)


def test_sides_that_are_no_multiples_of_a_block_are_refused(
    source: Path, dtype: str, tmp_path: Path
) -> None:
    with pytest.raises(
        SynthError, match=r"gate_proj.weight is \[200, 512\], and fp8 and int4 take"
    ):
        grow(source, tmp_path / "grown", altered(LARGE, intermediate_size=200), dtype=dtype)
    assert not (tmp_path / "grown").exists()


@pytest.mark.slow_except(1)
def test_the_command_line_writes_them(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grown"
    options = ["--like", "llama-3.2-1b", "--size", "120MB", "--vocab-size", "4096"]
    assert main(["synth", "-o", str(out), "--dtype", dtype, *options]) == 0
    assert "grown from pair:target" in capsys.readouterr().out
    assert sum(p.stat().st_size for p in out.iterdir()) == pytest.approx(120e6, rel=0.05)

"""Impossible shapes are refused before anything is written; no partial output stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from grown_models import LARGE, SMALL, altered, save_source

from bench.commands.app import main
from bench.synth import files as synth_files
from bench.synth.checkpoint import grow
from bench.synth.shapes import SynthError
from bench.synth.source import SourceModel, source_shape


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("small"), SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden size 32 > 16"),
        ({"intermediate_size": 16}, "intermediate size"),
        ({"n_layers": 1}, "number of layers"),
        ({"vocab_size": 50}, "vocabulary"),
        ({"n_kv_heads": 1, "n_heads": 6}, "key/value heads"),
        ({"n_heads": 7}, "no multiple"),
        ({"hidden_size": 241}, "hidden size 241"),
        ({"head_dim": 9, "n_kv_heads": 3}, "cannot be cut"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    source: Path, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(SynthError, match=message):
        grow(source, tmp_path / "grown", altered(LARGE, **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen2"}, "only Llama"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "llama", "num_attention_heads": 2}, "lacks 'hidden_size'"),
    ],
)
def test_sources_that_are_no_plain_llama_are_refused(
    config: dict[str, object], message: str
) -> None:
    with pytest.raises(SynthError, match=message):
        source_shape(config)


@pytest.mark.parametrize("value", ["abc", 0, -3, 2.5, True, [1], 2**40])
def test_a_value_that_is_no_size_is_refused(value: object) -> None:
    results = ("num_attention_heads", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = {"model_type": "llama", "vocab_size": 10, **dict.fromkeys(results, 4)}
    assert source_shape(config).n_kv_heads == 4
    for name in (*config, "head_dim", "num_key_value_heads"):
        if name != "model_type":
            with pytest.raises(SynthError, match=f"{name} is .*, must be a whole number from 1 to"):
                source_shape({**config, name: value})


def test_a_gguf_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SynthError, match=r"no config\.json in .*: name the folder of a checkpoint"):
        SourceModel(tmp_path / "model.gguf")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match=r"no config\.json"):
        grow(tmp_path, tmp_path / "grown", LARGE)


def test_a_full_disk_is_noticed_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(synth_files.shutil, "disk_usage", lambda path: usage(10, 10, 1024))
    with pytest.raises(SynthError, match=r"needed, 1\.00 KiB free"):
        grow(source, tmp_path / "grown", LARGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(28, "No space left on device"), SynthError), (KeyboardInterrupt(), BaseException)],
)
def test_nothing_half_written_stays(
    source: Path, tmp_path: Path, error: BaseException, expected: type[BaseException]
) -> None:
    def fail(n_bytes: int, total: int) -> None:
        if n_bytes > total / 2:
            raise error

    with pytest.raises(expected):
        grow(source, tmp_path / "grown", LARGE, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_only_when_forced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "grown"
    grow(source, out, LARGE)
    (out / "stale").write_text("old")
    with pytest.raises(SynthError, match="not empty"):
        grow(source, out, LARGE)
    assert (out / "stale").exists()
    grow(source, out, LARGE, force=True)
    assert not (out / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["grown"]


def test_force_spares_the_source_and_what_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="holds the source"):
        grow(source, source, LARGE, force=True)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(SynthError, match="no checkpoint"):
        grow(source, tmp_path, LARGE, force=True)
    assert (tmp_path / "letter.txt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "onnx"], "unknown format 'onnx'; known: hf, gguf"),
        (["--dtype", "q4_0"], "unknown dtype 'q4_0' for hf; known: bf16, fp32"),
        (
            ["--format", "gguf", "--dtype", "q5_0"],
            "unknown dtype 'q5_0' for gguf; known: q4_0, q4_k_s",
        ),
        (["--like", "gpt-5"], "unknown shape 'gpt-5'"),
        (["--size", "many"], "many"),
        (["--from", "no/such/folder"], "no/such/folder"),
        (["--from", "pair:oracle"], "known: pair:target, pair:draft"),
        (["--like", "llama-3.2-1b", "--format", "gguf"], "must end in .gguf"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["synth", "-o", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specdec-bench synth: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.gguf
def test_the_command_line_writes_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = pytest.importorskip("gguf")
    out = tmp_path / "grown.gguf"
    options = ["--format", "gguf", "--dtype", "q8_0", "--vocab-size", "4096"]
    argv = ["synth", "-o", str(out), "--like", "llama-3.2-1b", "--size", "600MB", *options]
    assert main(argv) == 0
    assert "grown from pair:target" in capsys.readouterr().out
    assert out.stat().st_size == pytest.approx(600e6, rel=0.03)
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert kinds == {"Q8_0", "F32"}

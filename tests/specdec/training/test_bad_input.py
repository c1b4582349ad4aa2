"""`specdec train-draft` as a user calls it: each mistake is one line, exit code 2, nothing left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import expect_error
from tiny_pair import save_model

from specdec.cli.app import main


@pytest.fixture
def argv(target, draft, text, tmp_path) -> dict[str, str]:
    """Options of a training that works, by name."""
    return {
        "-m": str(target),
        "--from": str(draft),
        "--text": str(text),
        "-o": str(tmp_path / "out"),
        "--length": "64",
        "--epochs": "0.2",
        "--generate": "0",
        "--threads": "1",
        "--memory-budget": "2GiB",
    }


def words(argv: dict[str, str], **changes: str | None) -> list[str]:
    named = {("--" + name.replace("_", "-")): value for name, value in changes.items()}
    short = {"--model": "-m", "--out": "-o"}
    merged = {**argv, **{short.get(name, name): value for name, value in named.items()}}
    options = [word for name, value in merged.items() if value for word in (name, value)]
    return ["train-draft", *options]


def refuse(capsys, tmp_path: Path, command: list[str], *parts: str) -> None:
    capsys.readouterr()
    expect_error(capsys, command, *parts)
    out = tmp_path / "out"
    assert not out.exists() or not (out / "training").exists()


def test_the_report(argv, tmp_path, capsys) -> None:
    capsys.readouterr()
    assert main([*words(argv, epochs="6", learning_rate="0.02"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(tmp_path / "out")
    assert report["after"]["agreement"] > report["before"]["agreement"]
    refuse(capsys, tmp_path, words(argv), "is there already")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"from": None}, ["--from DRAFT", "--kind mtp"]),
        ({"kind": "mtp"}, ["--from DRAFT", "--kind mtp"]),
        ({"from": None, "kind": "medusa"}, ["--kind is 'medusa'", "mtp"]),
        ({"text": None}, ["--text FILE", "--traces DIR"]),
        ({"traces": "/tmp"}, ["--text FILE", "--traces DIR"]),
        ({"text": None, "traces": "/nowhere"}, ["/nowhere has no traces.json"]),
        ({"text": "/nowhere"}, ["no such text: /nowhere"]),
        ({"minutes": "0"}, ["--minutes is 0"]),
        ({"epochs": "-1"}, ["--epochs is -1"]),
        ({"learning_rate": "0"}, ["--learning-rate is 0"]),
        ({"model": "/nowhere"}, ["no such model"]),
        ({"from": "./nowhere"}, ["no such model"]),
        ({"from": "pair:draft.gguf"}, ["is a GGUF file", "safetensors"]),
        ({"from": None, "kind": "mtp", "model": "pair:target.gguf"}, ["is a GGUF file", "--from"]),
        ({"intermediate_size": "64"}, ["--intermediate-size is for new heads alone"]),
        ({"head_layers": "2"}, ["--head-layers is for new DFlash heads alone"]),
        ({"from": "pair:draft"}, ["does not fit the target"]),
        ({"memory_budget": "500MiB"}, ["memory budget has 500.00 MiB"]),
        ({"memory_budget": "1MiB"}, ["million weights takes", "memory budget is 1.00 MiB"]),
        ({"out": "/proc/draft"}, ["cannot write /proc/draft"]),
    ],
    ids=lambda value: next(iter(value.items()))[0] if isinstance(value, dict) else "",
)
def test_options_and_names(argv, tmp_path, capsys, changes, parts) -> None:
    refuse(capsys, tmp_path, words(argv, **changes), *parts)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00", "is no UTF-8 text"),
        (b"   \n", "is no UTF-8 text"),
        (b"int main;", "the text has 0 tokens, at least 1024"),
        (b"int main; " * 50, "the text has 500 tokens, at least 1024"),
    ],
)
def test_texts(argv, tmp_path, capsys, content, part) -> None:
    path = tmp_path / "text.c"
    path.write_bytes(content)
    refuse(capsys, tmp_path, words(argv, text=str(path)), part)


def test_a_folder_without_text(argv, tmp_path, capsys) -> None:
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x").write_bytes(b"\0\1\2")
    refuse(capsys, tmp_path, words(argv, text=str(tmp_path / "binary")), "no text there")


def test_another_vocabulary(argv, tmp_path, capsys) -> None:
    other = save_model(tmp_path / "other", seed=1, first=7)
    refuse(capsys, tmp_path, words(argv, **{"from": str(other)}), "does not fit the target")


def test_the_target_as_its_own_draft(argv, tmp_path, capsys) -> None:
    refuse(capsys, tmp_path, words(argv, **{"from": argv["-m"]}), "is the target itself")


def test_a_quantised_draft(argv, draft, tmp_path, capsys) -> None:
    copy = shutil.copytree(draft, tmp_path / "quantised")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (copy / "config.json").write_text(json.dumps(config))
    refuse(capsys, tmp_path, words(argv, **{"from": str(copy)}), "quantised")


def test_a_draft_with_broken_weights(argv, draft, tmp_path, capsys) -> None:
    copy = shutil.copytree(draft, tmp_path / "broken")
    for path in copy.glob("*.safetensors"):
        path.write_bytes(b"broken")
    refuse(capsys, tmp_path, words(argv, **{"from": str(copy)}), "safetensors")


def test_a_folder_with_other_files(argv, tmp_path, capsys) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    refuse(capsys, tmp_path, words(argv), "is there already")
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_a_full_disk(argv, tmp_path, capsys, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refuse(capsys, tmp_path, words(argv), "are free", "--max-tokens")


def test_traces_of_another_vocabulary(argv, tmp_path, capsys) -> None:
    from specdec.traces.format import TraceHeader
    from specdec.traces.writer import TraceWriter

    TraceWriter(tmp_path / "traces", TraceHeader(50, "another")).close()
    changed = words(argv, text=None, traces=str(tmp_path / "traces"))
    refuse(capsys, tmp_path, changed, "traces over 50 tokens")


def test_few_traces(argv, tmp_path, capsys) -> None:
    from tiny_pair import VOCAB

    from specdec.traces.format import TraceHeader
    from specdec.traces.writer import TraceWriter

    TraceWriter(tmp_path / "traces", TraceHeader(VOCAB, "this")).close()
    changed = words(argv, text=None, traces=str(tmp_path / "traces"))
    refuse(capsys, tmp_path, changed, "traces of 0 tokens")


def test_a_learning_rate_that_is_too_high(argv, tmp_path, capsys) -> None:
    capsys.readouterr()
    command = words(argv, learning_rate="1e30", epochs="5")
    expect_error(capsys, command, "is not finite", "--learning-rate")

"""Invalid options of `specdec-bench`: always one clear line and exit code 2."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tiny_pair import save_model

from bench.commands.app import main

NO_PROMPTS = "--prompts /nonexistent.jsonl"
BEFORE_A_MODEL = [
    ("policy --sizes many", "many"),
    (f"policy {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
    (f"speedup {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
    (f"curve {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
    (f"timeline --trace trace.json {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
    ("timeline", "nowhere to draw"),
    ("perplexity --text /nonexistent.txt", "--text /nonexistent.txt: No such file"),
    (f"perplexity --text {__file__} --cache-types own,f8", "'f8' is none of own, f16"),
    ("timeline -o /nonexistent/run.png", "no such folder"),
    ("timeline --trace /nonexistent/run.json", "no such folder"),
    ("timeline -o run.png --steps -1", "--steps"),
    (f"peers --memory-budget 1GiB {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
    ("peers --memory-budget 1GiB --peer-cpu-memory lots", "'lots' is not a byte count"),
    ("peers --memory-budget 1GiB --other-draft x", "--other-draft goes with --other-model"),
    (f"sweep --trees 0 -o sweep.json {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
    ("sweep -o sweep.json", "--trees above 0 need a draft model"),
    ("sweep --trees 0 -o sweep.json --reference /nonexistent", "/nonexistent: No such file"),
    ("speedup --output-file pipe", "--output-file pipe: No such device"),
]
WITH_A_MODEL = [
    ("peers --peers ollama", "'ollama' is not known"),
    ("peers --peers ,", "names no program"),
    ("peers --peers specdec-plain", "--memory-budget with a size"),
    ("peers --memory-budget 1GiB -o xml", "'xml' is not known"),
    ("peers --memory-budget 1GiB --other-model {target}", "the same format"),
    ("peers --memory-budget 1GiB --no-enforce --storage-mbps 90", "--no-enforce leaves out"),
    ("peers --memory-budget 1GiB --output-file /nonexistent/r.json", "no such folder"),
    ("peers --memory-budget 1GiB --peers llama.cpp", "nothing can run: llama.cpp, "),
    ("peers --memory-budget 1GiB --accept-threshold 0.5", "--accept-threshold is lossy"),
    ("sweep {sweep} --storage turtle", "'turtle' is no speed"),
    ("sweep {sweep} --storage -5", "'-5' is no speed"),
    ("sweep {sweep} --storage sata --no-enforce", "--no-enforce leaves out"),
    ("sweep {sweep} --trees many", "many"),
    ("sweep {sweep} --budgets lots", "lots"),
    ("sweep {sweep} --budgets 1GiB,0GB", "a budget of 0 bytes"),
    ("sweep {sweep} --memory-budget 2GiB", "--memory-budget 2GiB does not go with --budgets"),
    ("sweep {sweep},10MiB", "--budgets 10.00 MiB: "),
    ("sweep {sweep} --accept-threshold 0.5", "--accept-threshold is lossy"),
    ("speedup -o xml", "'xml' is not known"),
    ("speedup --peer accelerate --peer-tokens 4", "--peer is now: specdec-bench peers"),
    ("speedup --enforce", "--memory-budget with a size"),
    ("speedup --output-file /nonexistent/report.json", "no such folder"),
    ("speedup --n-prompts 0", "--n-prompts"),
    ("speedup --spec-type magic", "magic"),
    ("curve --rates 2", "--rates"),
    ("curve --sizes 0", "--sizes"),
    ("curve -o xml", "'xml' is not known"),
    ("curve --enforce", "--memory-budget with a size"),
    ("curve --output-file /nonexistent/curve.json", "no such folder"),
    ("curve --log /nonexistent/log.jsonl", "no such folder"),
    ("curve -md pair:draft", "pair:draft"),
    ("curve --num-draft-tokens 4", "--num-draft-tokens"),
    ("curve --memory-budget lots", "lots"),
    ("throughput --sequences 0,2", "give numbers of sequences"),
    ("throughput --sequences two", "give numbers of sequences"),
    ("throughput --sequences 400", "asks for 400 prompts"),
    ("throughput --modes fast", "is not plain, speculative or both"),
    ("throughput --enforce", "needs a --memory-budget"),
    ("experts --budgets auto", "give sizes, such as 2GiB,4GiB"),
    ("experts --budgets 0GiB", "a budget of 0 bytes holds nothing"),
    ("experts --budgets 2GiB", "no mixture of experts"),
    ("experts --budgets 2GiB --trees 0,1", "give one with -md"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("refusals") / "target", seed=1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match("specdec-bench( synth)?: error: ", err), err
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(("argv", "part"), BEFORE_A_MODEL)
def test_options_alone_are_refused_before_a_model_is_looked_for(
    argv: str, part: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options are checked before a model is looked for or downloaded."""
    os.mkfifo("pipe")
    assert part in refusal(capsys, *argv.split(), "-m", "/nonexistent/model")
    assert os.listdir() == ["pipe"]


@pytest.mark.slow_except(9)
@pytest.mark.parametrize(("argv", "part"), WITH_A_MODEL)
def test_options_are_refused_before_anything_is_measured(
    argv: str, part: str, folder: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = f"-md {target} -o s --budgets 1GiB"
    words = argv.format(target=target, sweep=sweep).split()
    assert part in refusal(capsys, words[0], "-m", str(target), *words[1:])
    assert os.listdir() == []


@pytest.mark.parametrize(
    "command", ["speedup", "policy --sizes 2x2", "curve --rates 0.5 --sizes 2"]
)
def test_a_prompt_that_does_not_fit_the_context_is_named(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(folder / "short", seed=1, max_position_embeddings=64)
    Path("prompts.jsonl").write_text('{"id": "p100", "prompt": "' + "a" * 100 + '"}\n')
    capsys.readouterr()
    argv = [*command.split(), "-m", str(model), "--prompts", "prompts.jsonl"]
    assert "--prompts, p100: the prompt has 100 tokens" in refusal(capsys, *argv)


def test_a_size_without_a_unit_names_its_option(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--size: '6' has no unit" in refusal(capsys, "synth", "-o", "new", "--size", "6")
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("-o folder", "folder is not empty; choose another folder, or pass --force"),
        ("-o folder --force", "folder is no checkpoint (no config.json): --force spares it"),
        ("-o new --format gguf", "new must end in .gguf"),
        ("-o folder/mine.gguf --format gguf --force", "mine.gguf is no GGUF file"),
    ],
)
def test_what_is_grown_spares_what_is_there(
    argv: str, part: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "folder").mkdir()
    (folder / "folder" / "mine.gguf").write_text("mine")
    assert part in refusal(capsys, "synth", *argv.split(), "--from", "/nonexistent/model")

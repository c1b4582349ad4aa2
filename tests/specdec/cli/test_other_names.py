"""Options of llama.cpp, vLLM and Ollama, and a model without -m."""

from __future__ import annotations

import pytest
import typer
from command_line import expect_error

from specdec.cli.app import app
from specdec.cli.arguments import understood
from specdec.cli.options import OptionError
from specdec.cli.other_names import REFUSED, RENAMED, REPLACED, SKIPPED

COMMAND = typer.main.get_command(app)


def run(line: str) -> str:
    """Return the arguments of `specdec run` in our names."""
    return " ".join(understood(["run", *line.split()], COMMAND)[1:])


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("--temp 0.5 --n-predict=3", "--temperature 0.5 --max-tokens=3"),
        ("-t 4 -s 1 -hf a/b:Q4_0", "--threads 4 --seed 1 --model a/b:Q4_0"),
        ("--draft-max 8 --max-model-len 512", "--num-draft-tokens 8 --ctx-size 512"),
        ("-no-cnv -p x", "--raw -p x"),
        ("--mmap -p x", "--load-mode=mmap -p x"),
        ("-p --temp --stop --n-predict -- --temp", "-p --temp --stop --n-predict -- --temp"),
        ("MODEL -n 3", "-m MODEL -n 3"),
        ("MODEL Why -n 3", "-m MODEL -p Why -n 3"),
        ("-m MODEL Why", "-m MODEL -p Why"),
        ("-n 3 MODEL -p Why", "-n 3 -m MODEL -p Why"),
        ("MODEL -", "-m MODEL -p -"),
        ("--json MODEL -f FILE rest", "--json -m MODEL -f FILE rest"),
    ],
)
def test_words_are_understood(line: str, ours: str) -> None:
    assert run(line) == ours


def test_the_limit_of_an_answer_is_that_of_all_answers_in_a_server() -> None:
    for line in ("-n -1", "--n-predict -1", "--predict=128", "--max-tokens 128"):
        words = ["serve", "MODEL", *line.split()]
        shown = line.replace("-n ", "--n-predict ")
        shown = shown.replace("--n-predict", "--max-output-tokens")
        shown = shown.replace("--predict", "--max-output-tokens")
        shown = shown.replace("--max-tokens", "--max-output-tokens")
        assert understood(words, COMMAND) == ["serve", "-m", "MODEL", *shown.split()]


def test_a_command_with_arguments_keeps_them() -> None:
    for line in ("batch in.jsonl -m MODEL", "models FOLDER", "pull a/b", "demo --temp 1"):
        assert understood(line.split(), COMMAND) == line.split()
    assert understood(["--config", "FILE", "plan", "MODEL"], COMMAND)[2:] == ["plan", "-m", "MODEL"]


@pytest.mark.parametrize("name", sorted(SKIPPED))
def test_an_option_without_effect_is_skipped_with_a_note(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, *({"value": ["8"], "switch": ["on"], "none": []}[SKIPPED[name].value])]
    assert run(" ".join([*words, "-p", "x"])) == "-p x"
    err = capsys.readouterr().err
    assert err.startswith(f"specdec: note: {' '.join(words)} has no effect: ")
    assert len(err) <= 160, "two lines of a terminal"


def test_a_switch_may_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-fa MODEL -p x") == "-m MODEL -p x"
    assert "note: -fa has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_option_that_is_refused_names_the_remedy(name: str) -> None:
    with pytest.raises(OptionError, match=f"^{name}.*: ") as error:
        run(f"{name} 8 -p x")
    assert len(str(error.value)) <= 160


def test_a_refused_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    expect_error(
        capsys,
        ["run", "m", "x", "-ngl", "99"],
        "-ngl 99: GGUF files run on the CPU here; --device cuda places",
    )


def test_each_name_means_one_thing_and_is_none_of_ours() -> None:
    tables = (RENAMED, REPLACED, SKIPPED, REFUSED)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    for command in ("run", "chat", "serve", "plan"):
        ours = {name for item in COMMAND.commands[command].params for name in item.opts}
        assert not ours & set(names)


def test_new_names_are_options_of_some_command() -> None:
    import bench.commands.app

    groups = (COMMAND, typer.main.get_command(bench.commands.app.app))
    known = {
        name
        for group in groups
        for command in group.commands.values()
        for item in command.params
        for name in item.opts
    }
    targets = {*RENAMED.values(), *(new.partition("=")[0] for new in REPLACED.values())}
    assert targets - known == {"--modes-per-prompt"}, "an option of bench.checks.identity"

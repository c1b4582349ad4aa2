"""Errors on the command line: one clear line and exit code 2, for every option.

One table of mistakes for all options; that any other value is refused as clearly is a property.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from command_line import Models, expect_error, run_without_torch, save_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.cli.app import main
from specdec.option import options_of
from specdec.run_options import RunOptions
from specdec.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


BEAMS = "--num-beams 3 "
BEFORE_A_MODEL: list[tuple[str, str]] = [
    ("-f b", "both -p and -f"),
    ("-p", "'-p' requires an argument (see"),
    ("--bogus", "--bogus"),
    ("extra", "extra"),
    ("-n 0", "0 is no number of tokens: 1 or more, or -1 for no limit (see specdec run"),
    ("-n -3", "-3 is no number of tokens"),
    ("-n x", "-n' / '--max-tokens': 'x' should be a valid integer"),
    ("-c -1", "-c"),
    ("--threads 5000", "--threads is 5000, must be an integer at least 1 and at"),
    ("--io-threads 100000", "--io-threads is 100000, must be an integer at least"),
    ("--prefetch-depth 100000", "--prefetch-depth is 100000, must be an integer"),
    ("--memory-budget lots", "--memory-budget: 'lots' is not a byte count"),
    ("--memory-budget 0GB", "--memory-budget is 0GB, must be positive: try 2GiB, or auto"),
    ("--memory-budget 3.5", "--memory-budget: '3.5' has no unit; write for example"),
    ("--vram-budget 0", "--vram-budget: '0' has no unit"),
    ("--vram-budget 0B", "must be positive"),
    ("--device gpu", "--device is 'gpu', must be one of cpu, cuda, auto"),
    ("--draft-device x", "--draft-device is 'x'"),
    ("--enforce", "--enforce needs a size"),
    ("--enforce --memory-budget 1MiB", "too little"),
    ("--spec-type magic", "--spec-type 'magic' is unknown"),
    ("--spec-type draft", "--spec-type has 'draft' but no draft model was named: give --draft-mod"),
    ("--num-draft-tokens many", "'many'"),
    ("--num-draft-tokens -1", "'-1', must be auto or a whole number from 0"),
    ("--num-draft-tokens 99999", "99999"),
    ("--draft-ahead maybe", "--draft-ahead is 'maybe'"),
    ("--temperature -1", "--temperature is -1.0, must be 0 (greedy) or from 0.0001"),
    ("--temperature nan", "--temperature is nan"),
    ("--top-p 0", "--top-p is 0.0, must be a number above 0.0"),
    ("--top-p 1.5", "--top-p is 1.5"),
    ("--min-p 2", "--min-p is 2.0, must be a number at least 0.0"),
    ("--seed -1", "--seed is -1, must be an integer"),
    ("--stop=", "--stop holds '', every stop must be a non-empty string"),
    ("--num-return-sequences 2", "--num-return-sequences is 2, but greedy decoding has one result: "
     "set a temperature or --num-beams"),
    ("--length-penalty 2", "--length-penalty is 2.0, but --num-beams is 1: it ranks beams"),
    ("--early-stopping true", "--early-stopping is True, but --num-beams is 1"),
    ("--beam-span 9", "without --num-beams"),
    (BEAMS + "--num-return-sequences 4", "--num-return-sequences is 4, but beam search with "
     "--num-beams 3 finds no more than"),
    (BEAMS + "-md x", "leave --draft-model out"),
    (BEAMS + "--spec-type ngram", "leave --spec-type out"),
    (BEAMS + "--num-draft-tokens 4", "leave --num-draft-tokens out"),
    (BEAMS + "--tree-width 4", "leave --tree-width out"),
    (BEAMS + "--acceptance block", "leave --acceptance out"),
    (BEAMS + "--accept-threshold 0.3", "leave --accept-threshold out"),
    (BEAMS + "--early-stopping soon", "must be true, false or never"),
    (BEAMS + "--length-penalty 99", "--length-penalty is 99.0"),
    ("--acceptance block --tree-width 2",
     "--acceptance 'block' verifies one chain, but --tree-width is 2"),
    ("--acceptance block --accept-threshold 0.5",
     "--accept-threshold is 0.5, but --acceptance 'block' decides"),
    ("--exact on --acceptance block -md x",
     "--exact is 'on', but with --acceptance block the tokens are not plain decoding's"),
    ("--load-mode x", "--load-mode is 'x', must be one of"),
    ("--cache-type-k x", "--cache-type-k is 'x', must be one of"),
    (
        "--regex a --grammar {file}",
        "--regex and --grammar {file} are given, but a request may have",
    ),
    ("--json-schema {file}", "--json-schema {file} is [1], must be an object"),
    ("--json-schema /none/schema", "/none/schema"),
    ("--logprobs 1", "--json"),
    ("--system x -f /dev/null", "both -p and -f"),
]  # fmt: skip


@pytest.mark.slow_except(14)
@pytest.mark.parametrize(
    ("options", "message"), BEFORE_A_MODEL, ids=[item for item, _ in BEFORE_A_MODEL]
)
def test_a_mistake_in_the_options_of_a_run(
    options: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The message names the option as typed, before the model is looked for, which may download."""
    file = tmp_path / "num_beams is 1"  # a field's name inside a text is not an option
    file.write_text("[1]")
    argv = [word.replace("{file}", str(file)) for word in shlex.split(options)]
    said = message.replace("{file}", str(file))
    expect_error(capsys, ["run", "-m", "no/such/model", "-p", "x", *argv], said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "no prompt was given"),
        ("-p ''", "the prompt is empty: give some text"),
        ("-f /nonexistent/prompt", "/nonexistent/prompt: No such file"),
        ("-f /", "Is a directory"),
        ("-f /proc/self/mem", "cannot read /proc/self/mem: "),
        ("-p a --memory-budget 20MiB", "smallest budget"),
        ("-p a -md {other}", "token 3 is '!' in the target and '(' in the draft"),
        ("-p a -md self:window=512", "was removed because n-grams are faster: leave -md out"),
        ("-p a --json --logprobs 1000000", "logprobs"),
        (f"-p {'a' * 200} -c 100", "200 tokens"),
    ],
)
def test_a_mistake_that_the_model_shows(
    options: str, message: str, capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    argv = shlex.split(options.format(other=models.other_words))
    expect_error(capsys, ["run", "-m", str(models.target), *argv], message)


@pytest.mark.slow_except(9)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("bogus", "bogus"),
        ("run -p a", "--model"),
        ("check -m x", "--draft-model"),
        ("run -m /nonexistent/model -p a", "/nonexistent/model"),
        ("run -m nobody/nothing -p a", "nobody/nothing"),
        ("run -m pair:other -p a", "pair:other"),
        ("chat -m pair:target --chat-template chatlm", "name a file, or one of plain, chatml"),
        ("plan -m /", "config.json"),
        ("run -p x -m {damaged} --memory-budget 900TiB", "memory budget of 900.00 TiB is above"),
        ("run -p x -m {damaged} --vram-budget 1GiB",
         "--vram-budget is 1GiB, but the target is computed on the CPU"),
        ("run -p x -m {damaged} --draft-device cuda",
         "--draft-device is 'cuda', but the target is computed on the CPU"),
        ("run -p x -m {damaged} --prompt-cache-dir /etc/passwd",
         "the prompt cache /etc/passwd is not a folder: name another one"),
        ("run -p x -m {damaged} --prompt-cache-dir /dev/null/x", "/dev/null/x cannot be made"),
        ("run -p x -m {damaged} --prompt-cache-dir /proc/self/task",
         "/proc/self/task cannot be written to"),
        ("run -p x -m {damaged} --prompt-cache-size 3", "--prompt-cache-size: '3' has no unit"),
        ("recommend --memory-budget lots", "--memory-budget: 'lots' is not a byte count"),
        ("plan -m pair:target --memory-budget 900TiB", "is above the limit of this process"),
        ("plan -m {damaged}", "/damaged/config.json is not valid JSON (line 1, column "),
        ("plan -m pair:target --on {pipe}.json", "is no JSON"),
        ("profile -m /nonexistent/model", "/nonexistent/model"),
        ("analyze -m /nonexistent/model", "/nonexistent/model"),
        ("analyze -m {damaged} --on laptop", "config.json"),
        ("analyze -m pair:draft --on floppy", "no device 'floppy'"),
        ("analyze -m pair:draft --on missing.json", "cannot read missing.json"),
        ("analyze -m pair:draft --phase training", "error: --phase is 'training', must be"),
        ("analyze -m pair:draft --phase decode -n 3",
         "error: --n-tokens is 3, but decode passes have 1 token: use --phase verify"),
        ("analyze -m pair:draft --on laptop -n 9 -c 8", "more than the context of 8"),
        ("analyze -m pair:draft -n 0", "-n"),
        ("analyze -m pair:draft -c -1", "-c"),
        ("analyze -m pair:draft --memory-budget lots", "lots"),
        ("analyze -m pair:draft --on laptop -ctk q4_0", "a checkpoint cannot be q4_0: f16"),
        ("run -p a -m pair:target -ctk q4_0", "in a GGUF file of the model"),
        ("run -p a -m pair:target --load-mode mmap", "for GGUF models"),
        ("plan -m pair:target --load-mode mmap", "for GGUF models"),
        ("batch in.jsonl -m pair:target -o out.jsonl --workers 2", "--workers needs --ray"),
        ("batch in.jsonl -m pair:target -o out.jsonl --ray auto --enforce", "leave one out"),
        ("pack -m nowhere -o {damaged}/x", "no such model"),
        ("pack -m pair:target -o {damaged}", "is there already: name another folder"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_options_of_a_command(
    argv: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text("{")
    os.mkfifo(tmp_path / "pipe.json")
    words = argv.format(damaged=damaged, pipe=tmp_path / "pipe").split()
    expect_error(capsys, words, message)
    assert main(words) == 2
    assert "/pair/" not in capsys.readouterr().err  # an embedded model keeps its given name


@pytest.mark.slow
def test_user_errors_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    refused = [
        (["-m", "./nodir", "-p", "a"], "no such model directory: ./nodir: correct the path"),
        (["-m", "~/nodir", "-p", "a"], "no such model directory: /"),
        (["-m", "pair:target", "-md", "/no/dir", "-p", "a"], "no such model directory: /no/dir"),
        (["-m", "pair:target", "-p", ""], "the prompt is empty: give some text"),
        (["-m", "pair:target", "-p", "a", "--spec-type", "draft"], "give --draft-model (-md)"),
    ]
    messages = run_without_torch("specdec.cli.app", *(["run", *argv] for argv, _ in refused))
    for line, (_, part) in zip(messages, refused, strict=True):
        assert part in line
    options = ("--log", "--output-file")
    messages = run_without_torch(
        "bench.__main__",
        *(["speedup", "-m", "pair:target", option, str(tmp_path)] for option in options),
    )
    for line, option in zip(messages, options, strict=True):
        assert f"{option} {tmp_path}: Is a directory" in line


NAMES = sorted(
    "--" + (option.long or name).replace("_", "-").removeprefix("--")
    for kind in (RunOptions, SamplingParams)
    for name, option in options_of(kind).items()
    if option.panel and name != "model"
)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
"""Any string that a shell can pass."""


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(NAMES),
    value=VALUES
    | st.integers().map(str)
    | st.floats().map(str)
    | st.sampled_from(["auto", "1e400"]),
)
def test_any_value_of_any_option_is_taken_or_refused_in_one_line(
    name: str,
    value: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Without a model every run ends in an error; a valid value leaves the model to report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.getbasetemp())
        assert main(["run", "-m", "no/such/model", "-p", "x", f"{name}={value}"]) == 2
    out, err = capsys.readouterr()
    *notes, error = err.removesuffix("\n").split("\n")
    assert error.startswith("specdec: error: "), err
    assert all(note.startswith("specdec: note: ") for note in notes), err
    assert out == ""

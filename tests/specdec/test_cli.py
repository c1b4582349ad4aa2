"""The command line: names, streams, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_pair import save_model

from offload.cgroup import CgroupUnavailable, MemoryCgroup
from specdec.cli import main
from specdec.cli_errors import expand_aliases

ROOT = Path(__file__).resolve().parents[2]


class Models(NamedTuple):
    target: Path
    draft: Path
    other_words: Path
    """A draft with another vocabulary."""

    def run_argv(self, *more: str) -> list[str]:
        return ["run", "-m", str(self.target), "-md", str(self.draft), "--threads", "1", *more]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(
        save_model(root / "target", seed=1),
        save_model(root / "draft", seed=1),
        save_model(root / "other", seed=1, first=7),
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def expect_error(
    capsys: pytest.CaptureFixture[str], argv: list[str], *parts: str, code: int = 2
) -> None:
    """One line on stderr that names what is wrong, nothing on stdout."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specdec: error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    for part in parts:
        assert part in err


# --- the interface --------------------------------------------------------------------------


def help_of(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert main([command, "--help"]) == 0
    return capsys.readouterr().out


def test_option_names_are_an_interface(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "160")
    loading = (
        "-m --model -md --draft-model --memory-budget -c --ctx-size --threads --prefetch-depth "
        "--io-threads --spec-type --num-draft-tokens --tree-width"
    ).split()
    sampling = (
        "--temperature --top-k --top-p --min-p --repetition-penalty --seed --stop -n --max-tokens "
        "--enforce"
    ).split()
    own = {"run": ["-p", "--prompt", "-f", "--file", "--json"], "chat": [], "plan": ["--json"]}
    for command, more in own.items():
        words = set(help_of(capsys, command).replace(",", " ").split())
        wanted = {*loading, *more, *(() if command == "plan" else sampling)}
        assert wanted <= words, wanted - words
        assert not words & {"--temp", "--n-predict", "--repeat-penalty"}  # accepted, not shown


def test_no_arguments_show_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("run", "chat", "plan", "check", "profile", "demo"):
        assert command in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specdec ")


def test_llama_cpp_spellings() -> None:
    assert expand_aliases(["--temp", "0.5", "--n-predict=3", "--repeat-penalty", "1.1"]) == [
        "--temperature",
        "0.5",
        "--max-tokens=3",
        "--repetition-penalty",
        "1.1",
    ]
    untouched = ["-p", "--temp", "--stop", "--n-predict", "--", "--temp"]
    assert expand_aliases(untouched) == untouched


# --- a run ----------------------------------------------------------------------------------


def test_text_on_stdout_perf_line_on_stderr(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    assert main(models.run_argv("-p", "def f", "-n", "6")) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert len(out) > 1
    assert err.count("\n") == 1
    for part in ("tok/s", "tokens/pass", "GB streamed", "stall", "peak"):
        assert part in err


def run_json(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, Any]:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    value: dict[str, Any] = json.loads(out)
    return value


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    value = run_json(capsys, models.run_argv("-p", "def f", "-n", "6", "--json"))
    assert set(value) == {"text", "token_ids", "finish_reason", "stats"}
    assert len(value["token_ids"]) == value["stats"]["generated_tokens"] <= 6
    promised = (
        "tokens_per_second time_to_first_token time_per_output_token generated_tokens passes "
        "mean_acceptance_length acceptance_rate bytes_streamed stall_seconds draft_seconds "
        "peak_memory_bytes memory_budget_bytes kv_bytes kv_used_fraction flops_rejected_fraction"
    )
    assert set(promised.split()) <= set(value["stats"])


def test_every_way_of_drafting_gives_the_same_text(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    sampled = ["-p", "ab", "-n", "8", "--temperature", "0.8", "--seed", "3", "--json"]
    texts = [
        run_json(capsys, models.run_argv(*sampled, "--spec-type", kind))["token_ids"]
        for kind in ("none", "draft", "ngram", "draft,ngram")
    ]
    assert texts.count(texts[0]) == len(texts)


def test_prompt_from_stdin_and_file(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct = run_json(capsys, models.run_argv("-p", "x = 1", "-n", "4", "--json"))
    file = tmp_path / "prompt.txt"
    file.write_text("x = 1\n")
    from_file = run_json(capsys, models.run_argv("-f", str(file), "-n", "4", "--json"))
    with file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        from_stdin = run_json(capsys, models.run_argv("-p", "-", "-n", "4", "--json"))
    assert direct["token_ids"] == from_file["token_ids"] == from_stdin["token_ids"]


def test_plan(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    argv = ["plan", "-m", str(models.target), "-md", str(models.draft), "-c", "128"]
    assert main(argv) == 0
    assert "smallest budget that works" in capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["smallest_budget_bytes"] > 0


def test_check(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    assert main(["check", "-m", str(models.target), "-md", str(models.draft)]) == 0
    assert "ok" in capsys.readouterr().out
    assert main(["check", "-m", str(models.target), "-md", str(models.other_words)]) == 2
    out, err = capsys.readouterr()
    assert "not compatible" in out
    assert "token 3 is '!' in the target and '(' in the draft" in err
    assert err.count("\n") == 1


def test_profile(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    assert main(["profile", "-m", str(models.target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["storage_bytes_per_second"] > 0


def test_chat_without_a_template_is_refused(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lines").write_text("\nhello\n")
    with (tmp_path / "lines").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        expect_error(capsys, ["chat", "-m", str(models.target)], "chat template")


def test_chat_answers_until_the_end_of_input(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chatty = tmp_path / "chatty"
    shutil.copytree(models.target, chatty)
    (chatty / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (tmp_path / "lines").write_text("hello\n\nmore\n/exit\nnever\n")
    with (tmp_path / "lines").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["chat", "-m", str(chatty), "-n", "3", "--threads", "1"]) == 0
    assert capsys.readouterr().err.count("tok/s") == 2


# --- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ([], "no prompt was given"),
        (["-p", "a", "-f", "b"], "both -p and -f"),
        (["-f", "/nonexistent/prompt"], "/nonexistent/prompt: No such file"),
        (["-f", "/"], "Is a directory"),
        (["-p"], "requires an argument"),
        (["-p", "a", "--bogus"], "--bogus"),
        (["-p", "a", "extra"], "extra"),
        (["-p", "a", "-n", "0"], "-n"),
        (["-p", "a", "-n", "x"], "-n"),
        (["-p", "a", "-c", "-1"], "-c"),
        (["-p", "a", "--memory-budget", "lots"], "'lots' is not a byte count"),
        (["-p", "a", "--memory-budget", "20MiB"], "smallest budget"),
        (["-p", "a", "--memory-budget", "1000TiB"], "memory budget"),
        (["-p", "a", "--enforce"], "--enforce needs a size"),
        (["-p", "a", "--enforce", "--memory-budget", "1MiB"], "too little"),
        (["-p", "a", "--spec-type", "magic"], "magic"),
        (["-p", "a", "--num-draft-tokens", "many"], "many"),
        (["-p", "a", "--num-draft-tokens", "99999"], "99999"),
        (["-p", "a", "--temperature", "-1"], "temperature"),
        (["-p", "a", "--temperature", "nan"], "temperature"),
        (["-p", "a", "--top-p", "1.5"], "top_p"),
        (["-p", "a", "--seed", "-1"], "seed"),
        (["-p", "a", "--stop", ""], "stop"),
        (["-p", ""], "prompt is empty"),
        (["-p", "a" * 200, "-c", "100"], "200 tokens"),
    ],
)
def test_bad_options(
    capsys: pytest.CaptureFixture[str], models: Models, more: list[str], part: str
) -> None:
    expect_error(capsys, models.run_argv(*more), part)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["bogus"], "bogus"),
        (["run", "-p", "a"], "--model"),
        (["check", "-m", "x"], "--draft-model"),
        (["run", "-m", "/nonexistent/model", "-p", "a"], "/nonexistent/model"),
        (["run", "-m", "nobody/nothing", "-p", "a"], "nobody/nothing"),
        (["run", "-m", "pair:other", "-p", "a"], "pair:other"),
        (["plan", "-m", "/"], "config.json"),
        (["profile", "-m", "/nonexistent/model"], "/nonexistent/model"),
    ],
)
def test_bad_commands_and_models(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str
) -> None:
    expect_error(capsys, argv, part)


def test_prompt_that_is_not_utf8(
    capsys: pytest.CaptureFixture[str], models: Models, tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff")
    expect_error(capsys, models.run_argv("-f", str(tmp_path / "binary")), "byte 2 is not UTF-8")


def test_a_draft_with_another_vocabulary(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    argv = ["run", "-m", str(models.target), "-md", str(models.other_words), "-p", "a"]
    expect_error(capsys, argv, "token 3 is '!' in the target and '(' in the draft")


def _first_shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[0]


def _truncate(directory: Path) -> None:
    shard = _first_shard(directory)
    os.truncate(shard, shard.stat().st_size - 100)


def _garble_header(directory: Path) -> None:
    with _first_shard(directory).open("r+b") as file:
        file.write(b"\xff" * 8)


def _remove_shard(directory: Path) -> None:
    _first_shard(directory).unlink()


def _point_outside(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../../etc/passwd"
    path.write_text(json.dumps(index))


def _leave_only_pickle(directory: Path) -> None:
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _unknown_model_type(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "no-such-type"}')


def _no_causal_model(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "t5"}')


def _config_not_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _no_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _garble_header,
        _remove_shard,
        _point_outside,
        _leave_only_pickle,
        _unknown_model_type,
        _no_causal_model,
        _config_not_json,
        _no_tokenizer,
    ],
)
def test_damaged_checkpoints(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(models.target, damaged)
    before = sorted(path.name for path in damaged.iterdir())
    damage(damaged)
    expect_error(capsys, ["run", "-m", str(damaged), "-p", "a", "-n", "2"])
    assert {path.name for path in damaged.iterdir()} <= {*before, "pytorch_model.bin"}


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "/nonexistent/model", "-p", "a", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


# --- in a process of its own ----------------------------------------------------------------


def start(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "specdec", *argv],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_text(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.read(1), process.stderr.read() if process.stderr else b""


def test_ctrl_c_in_the_middle_of_a_generation(models: Models) -> None:
    process = start(models.run_argv("-p", "a", "-n", "30000", "--seed", "1", "--temperature", "2"))
    wait_for_text(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_reader_that_goes_away(models: Models) -> None:
    process = start(models.run_argv("-p", "a", "-n", "30000", "--seed", "1", "--temperature", "2"))
    wait_for_text(process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert err == b""


def require_cgroup() -> None:
    try:
        with MemoryCgroup.create(2**30):
            pass
    except CgroupUnavailable as error:
        pytest.skip(str(error))


def test_enforced_run(models: Models) -> None:
    require_cgroup()
    argv = models.run_argv("-p", "a", "-n", "4", "--json", "--memory-budget", "1.1GB", "--enforce")
    out, err = start(argv).communicate(timeout=240)
    # No whole number of pages: the kernel rounds the limit down, and the run goes by the limit.
    assert 1_100_000_000 - 4096 < json.loads(out)["stats"]["memory_budget_bytes"] <= 1.1e9, err
    assert err == b""


def test_ctrl_c_in_an_enforced_run(models: Models) -> None:
    require_cgroup()
    long = ["-p", "a", "-n", "30000", "--seed", "1", "--temperature", "2"]
    process = start(models.run_argv(*long, "--memory-budget", "1GiB", "--enforce"))
    wait_for_text(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err

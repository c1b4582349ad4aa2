"""`specdec check --rank`: every candidate is measured or told why not, the best one is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from command_line import Models, expect_error, save_models
from tiny_pair import save_model

from specdec.cli import main
from specdec.prompt_files import read_prompts
from specdec.ranking import Ranking, rank_drafts

N_TOKENS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with the target's vocabulary and other weights."""
    return save_model(tmp_path_factory.mktemp("stranger") / "stranger", seed=9)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text('{"prompt": "def f(x):"}\n{"turns": ["ab"]}\n{"prompt": "not used"}\n')
    return path


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for the module: the storage is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def argv_of(models: Models, prompts: Path, *drafts: Path) -> list[str]:
    named = [word for draft in drafts for word in ("-md", str(draft))]
    return [
        *("check", "-m", str(models.target), *named, "--rank", "--prompts", str(prompts)),
        *("--n-prompts", "2", "-n", str(N_TOKENS), "--threads", "1"),
    ]


@pytest.fixture(scope="module")
def ranking(models: Models, stranger: Path, prompts: Path) -> Ranking:
    """Of all kinds of candidates."""
    return rank_drafts(
        str(models.target),
        [str(models.draft), str(stranger), str(models.other_words)],
        read_prompts(prompts, 2),
        max_tokens=N_TOKENS,
        loading=lambda name: nullcontext(),
        load_options={"threads": 1, "num_draft_tokens": 4},
        sampling={"ignore_eos": True},
    )


def test_every_candidate_is_measured(ranking: Ranking, models: Models, stranger: Path) -> None:
    assert (ranking.model, ranking.n_prompts) == (str(models.target), 2)
    found = {one.name: one for one in ranking.candidates}
    unusable = found.pop(str(models.other_words))
    assert set(found) == {"none", "ngram", str(models.draft), str(stranger)}
    for one in found.values():
        assert one.problem is None
        assert one.generated_tokens == 2 * N_TOKENS
        assert one.tokens_per_second > 0
        assert one.predicted_tokens_per_second > 0
        assert one.is_lossless
    plain, itself = found["none"], found[str(models.draft)]
    assert ranking.plain_tokens_per_second == plain.tokens_per_second
    assert (plain.mean_acceptance_length, plain.passes) == (1.0, 2 * (N_TOKENS - 1))
    assert itself.mean_acceptance_length > 1.5  # the same weights as the target's
    assert itself.mean_acceptance_length >= found[str(stranger)].mean_acceptance_length
    assert itself.passes < plain.passes
    assert itself.draft_seconds > plain.draft_seconds
    assert unusable == ranking.candidates[-1]
    assert "token 3 is '!' in the target" in str(unusable.problem)
    assert unusable.tokens_per_second == 0.0


def test_the_fastest_is_named(ranking: Ranking) -> None:
    speeds = [one.tokens_per_second for one in ranking.candidates]
    assert speeds == sorted(speeds, reverse=True)
    value = json.loads(json.dumps(ranking.to_dict()))
    assert value["best"] == value["candidates"][0]["name"] == ranking.best.name
    heading, *rows, last = ranking.lines()
    assert "tok/s" in heading
    assert [row.split()[0] for row in rows] == [one.name for one in ranking.candidates]
    assert f"cannot be used: {ranking.candidates[-1].problem}" in rows[-1]
    assert last.startswith(f"best: {ranking.best.name}, ")


def test_command(capsys: pytest.CaptureFixture[str], models: Models, prompts: Path) -> None:
    argv = argv_of(models, prompts, models.draft, models.draft)  # named twice, measured once
    assert main([*argv, "--accept-threshold", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line for line in out.splitlines()[1:-1] if line.startswith(str(models.draft))]
    assert len(rows) == 1
    assert rows[0].endswith("LOSSY")
    assert main([*argv, "--json", "--num-draft-tokens", "4"]) == 0
    names = [one["name"] for one in json.loads(capsys.readouterr().out)["candidates"]]
    assert sorted(names) == sorted(["none", "ngram", str(models.draft)])


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--rank"], "add --prompts FILE"),
        (["--prompts", "x.jsonl"], "add --rank"),
        (["--rank", "--prompts", "/nonexistent.jsonl"], "No such file"),
        (["--rank", "--prompts", "x", "--spec-type", "ngram"], "leave them out"),
        (["--rank", "--prompts", "x", "-md", "/no/dir"], "no such model directory: /no/dir"),
        (["-md", "pair:draft"], "2 draft models were named"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], more: list[str], part: str) -> None:
    expect_error(capsys, ["check", "-m", "pair:target", "-md", "pair:draft", *more], part)


def test_no_draft_is_a_mistake(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    expect_error(capsys, ["check", "-m", "pair:target"], "no draft model was named: use -md")
    rank = ["--rank", "--prompts", str(prompts)]
    expect_error(capsys, ["check", "-m", "pair:target", *rank], "no draft model was named: use -md")


@pytest.mark.parametrize("command", ["run", "chat", "plan"])
def test_a_run_takes_one_draft(capsys: pytest.CaptureFixture[str], command: str) -> None:
    argv = [command, "-m", "pair:target", "-md", "pair:draft", "-md", "other"]
    if command == "run":
        argv += ["-p", "a"]
    expect_error(capsys, argv, "2 draft models were named (pair:draft, other)", "check --rank")


def test_a_target_that_cannot_be_loaded_is_no_drafts_fault(
    capsys: pytest.CaptureFixture[str], models: Models, prompts: Path
) -> None:
    argv = [*argv_of(models, prompts, models.draft), "--memory-budget", "1MiB"]
    expect_error(capsys, argv, "smallest budget")

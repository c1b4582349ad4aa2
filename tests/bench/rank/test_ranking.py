"""`specdec check --rank`: every candidate is measured or skipped with a reason; one is best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Models, expect_error, save_models, start
from tiny_pair import save_model

from bench.prompts.workloads import read_prompts
from bench.rank.command import main
from bench.rank.ranked_draft import RankedDraft, compare_speeds
from bench.rank.ranking import (
    Candidate,
    Measured,
    Ranking,
    RankingError,
    figures_of,
    measure_here,
    measure_in_child,
    rank_drafts,
)
from specdec.cli.app import main as specdec_main
from specdec.metrics.stats import GenerationStats

pytestmark = pytest.mark.usefixtures("forked_children")

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


def argv_of(models: Models, prompts: Path, *drafts: Path) -> list[str]:
    named = [word for draft in drafts for word in ("-md", str(draft))]
    return [
        *("-m", str(models.target), *named, "--prompts", str(prompts)),
        *("--n-prompts", "2", "-n", str(N_TOKENS), "--threads", "1"),
    ]


@pytest.fixture(scope="module")
def ranking(models: Models, stranger: Path, prompts: Path) -> Ranking:
    """A ranking of all kinds of candidates."""
    return rank_drafts(
        str(models.target),
        [str(models.draft), str(stranger), str(models.other_words)],
        [prompt.text for prompt in read_prompts(prompts, 2)],
        measure_here,
        max_tokens=N_TOKENS,
        load_options={"threads": 1, "num_draft_tokens": 4},
        sampling={"ignore_eos": True},
    )


def test_every_candidate_is_measured(ranking: Ranking, models: Models, stranger: Path) -> None:
    assert (ranking.model, ranking.n_prompts) == (str(models.target), 2)
    actual = {candidate.name: candidate for candidate in ranking.candidates}
    unusable = actual.pop(str(models.other_words))
    assert set(actual) == {"none", "ngram", str(models.draft), str(stranger)}
    for item in actual.values():
        assert item.problem is None
        assert item.generated_tokens == 2 * N_TOKENS
        assert item.tokens_per_second > 0
        assert item.predicted_tokens_per_second > 0
        assert item.is_lossless
    plain, itself = actual["none"], actual[str(models.draft)]
    assert ranking.plain_tokens_per_second == plain.tokens_per_second
    assert (plain.mean_acceptance_length, plain.passes) == (1.0, 2 * (N_TOKENS - 1))
    assert itself.mean_acceptance_length > 1.5  # the same weights as the target's
    assert itself.mean_acceptance_length >= actual[str(stranger)].mean_acceptance_length
    assert itself.passes < plain.passes
    assert itself.draft_seconds > plain.draft_seconds
    assert unusable == ranking.candidates[-1]
    assert "token 3 is '!' in the target" in str(unusable.problem)
    assert unusable.tokens_per_second == 0.0


def test_the_fastest_is_named(ranking: Ranking) -> None:
    speeds = [candidate.tokens_per_second for candidate in ranking.candidates]
    assert speeds == sorted(speeds, reverse=True)
    value = json.loads(json.dumps(ranking.to_dict()))
    assert value["best"] == value["candidates"][0]["name"] == ranking.best.name
    heading, *rows, last, following = ranking.lines()
    assert "tok/s" in heading
    assert [row.split()[0] for row in rows] == [candidate.name for candidate in ranking.candidates]
    assert f"cannot be used: {ranking.candidates[-1].problem}" in rows[-1]
    assert last.startswith(f"best: {ranking.best.name}, ")
    assert following.startswith(f"next: {ranking.candidates[1].name}, ")
    assert value["next_best"]["n_prompts"] == 2
    assert value["next_best"]["margin"] >= 0


def test_command(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Candidate, bool]] = []
    names = ["none", "ngram", str(models.draft)]

    def measure(candidate: Candidate, *, enforce: bool) -> Measured:
        asked.append((candidate, enforce))
        speed = float(1 + names.index(candidate.name))
        return measured(*[1 / speed] * len(candidate.prompts))

    monkeypatch.setattr("bench.rank.command.measure_in_child", measure)
    argv = argv_of(models, prompts, models.draft, models.draft)  # named twice, measured once
    more = ["--temperature", "0.7", "--memory-budget", "2GiB", "--enforce"]
    assert main([*argv, *more], "rank") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-2:] == [
        f"best: {models.draft}, 3.00x plain decoding",
        "next: ngram, 1.50 times the seconds per token (1.50 to 1.50, from 2 prompts)",
    ]
    assert [item.name for item, _ in asked] == [
        *names,
        *names[::-1],
    ]  # drift affects all of them equally
    assert [item.prompts for item, _ in asked] == [["def f(x):"]] * 3 + [["ab"]] * 3
    for item, enforce in asked:
        assert enforce
        assert item.sampling == {"seed": 0, "temperature": 0.7, "max_tokens": N_TOKENS}
        assert (item.load["memory_budget"], item.load["threads"]) == ("2GiB", 1)
    assert [item.load["draft_model"] for item, _ in asked[:3]] == [None, None, str(models.draft)]
    assert [item.load["spec_type"] for item, _ in asked[:3]] == [(), ("ngram",), ("draft", "ngram")]
    assert main([*argv, "--json"], "rank") == 0
    assert json.loads(capsys.readouterr().out)["best"] == str(models.draft)


def test_a_head_in_the_target_has_its_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    assert specdec_main(["check", "-m", "pair:hybrid", "-md", "mtp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compatible"] is True


def measured(*seconds: float, **more: Any) -> Measured:
    """Measurements of prompts of 11 tokens with these seconds for each token after the first."""
    stats = [GenerationStats(generated_tokens=11, decode_seconds=10 * s, **more) for s in seconds]
    return Measured(stats=[stat.to_dict() for stat in stats])


def ranked(name: str, *seconds: float) -> RankedDraft:
    return figures_of(name, [measured(*seconds)])


def test_halves_are_put_together_from_totals() -> None:
    first = measured(1.0, 2.0, passes=5, accepted_tokens=10, draft_seconds=0.5)
    second = measured(6.0, passes=30, draft_seconds=0.5)
    both = figures_of("a", [first, second])
    assert both.tokens_per_second == pytest.approx(30 / 90)
    assert both.mean_acceptance_length == pytest.approx(1 + 20 / 40)
    assert (both.passes, both.generated_tokens, both.draft_seconds) == (40, 33, 1.5)
    assert both.seconds_per_token == (1.0, 2.0, 6.0)
    assert figures_of("a", [first, Measured("killed")]).problem == "killed"


def test_a_lead_within_the_noise_is_none() -> None:
    best = ranked("a", 1.0, 1.0, 1.0)
    clear = compare_speeds(best, ranked("b", 2.0, 2.1, 1.9))
    assert clear.is_clear
    assert "cannot be told apart" not in clear.line()
    assert "2.00 times the seconds per token (1.8" in clear.line()
    noisy = compare_speeds(best, ranked("b", 2.0, 0.8, 1.0))
    assert not noisy.is_clear
    assert noisy.line().endswith("from 3 prompts): they cannot be told apart")
    # Twice the standard error of log 2, log 0.8 and 0.
    assert noisy.margin == pytest.approx(2 * np.std(np.log([2.0, 0.8, 1.0]), ddof=1) / 3**0.5)
    single = compare_speeds(ranked("a", 1.0), ranked("b", 2.0))
    assert (single.margin, single.is_clear) == (None, False)
    assert "takes more prompts" in single.line()
    assert compare_speeds(ranked("a", 1.0, 0.0), ranked("b", 2.0, 0.0)).n_prompts == 1


def test_a_child_measures(capfd: pytest.CaptureFixture[str], models: Models) -> None:
    load = {"model": str(models.target), "draft_model": str(models.draft), "threads": 1}
    options = {"num_draft_tokens": 4, "accept_threshold": 0.5}
    sampling = {"max_tokens": 3, "ignore_eos": True}
    half = measure_in_child(Candidate("a draft", {**load, **options}, ["ab"], sampling))
    actual = figures_of("a draft", [half])
    assert (actual.name, actual.problem) == ("a draft", None)
    assert actual.generated_tokens == 3
    assert actual.predicted_tokens_per_second > 0
    assert not actual.is_lossless
    assert [actual.decode_seconds / 2] == pytest.approx(actual.seconds_per_token)
    assert capfd.readouterr() == ("", "")


def test_a_table_tells_what_is_lossy() -> None:
    candidates = (RankedDraft("a", is_lossless=False), RankedDraft("none"))
    rows = Ranking("target", 1, 4, 0.0, candidates).lines()
    assert rows[1].endswith("LOSSY")
    assert "LOSSY" not in rows[2]


CANDIDATE = Candidate("a", {"draft_model": "a", "memory_budget": "1GiB"}, ["x"], {})


def test_a_child_that_the_kernel_kills_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def killed(module: str, argv: list[str], limit: str | None) -> int:
        limits.append(limit)
        return 137

    monkeypatch.setattr("bench.process.child.run_child", killed)
    assert "killed by the kernel" in str(measure_in_child(CANDIDATE, enforce=True).problem)
    assert measure_in_child(CANDIDATE).problem is not None
    assert limits == ["1GiB", None]


@pytest.mark.parametrize(("code", "error"), [(130, KeyboardInterrupt), (1, RankingError)])
def test_a_child_that_fails_ends_the_ranking(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type[BaseException]
) -> None:
    monkeypatch.setattr("bench.process.child.run_child", lambda *arguments: code)
    with pytest.raises(error):
        measure_in_child(CANDIDATE)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ([], "add --prompts FILE"),
        (["--prompts", "/nonexistent.jsonl"], "No such file"),
        (["--prompts", "x", "--spec-type", "ngram"], "leave them out"),
        (["--prompts", "x", "-md", "/no/dir"], "no such model directory: /no/dir"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], more: list[str], part: str) -> None:
    assert main(["-m", "pair:target", "-md", "pair:draft", *more], "rank") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert part in err


def test_check_becomes_the_benchmark_and_keeps_its_name(prompts: Path) -> None:
    argv = ["check", "-m", "pair:target", "--rank", "--prompts", str(prompts)]
    process = start(argv)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, b"")
    problem = "no draft model was named: use -md (--draft-model), once for each"
    assert err.decode() == f"specdec: error: {problem}\n"


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ([], "no draft model was named: use -md"),
        (["-md", "pair:draft", "--prompts", "x.jsonl"], "add --rank"),
        (["-md", "pair:draft", "-md", "pair:draft"], "2 draft models were named"),
    ],
)
def test_mistakes_without_ranking(
    capsys: pytest.CaptureFixture[str], more: list[str], part: str
) -> None:
    expect_error(capsys, ["check", "-m", "pair:target", *more], part)


@pytest.mark.parametrize("command", ["run", "chat", "plan"])
def test_a_run_takes_one_draft(capsys: pytest.CaptureFixture[str], command: str) -> None:
    argv = [command, "-m", "pair:target", "-md", "pair:draft", "-md", "other"]
    if command == "run":
        argv += ["-p", "a"]
    expect_error(capsys, argv, "2 draft models were named (pair:draft, other)", "check --rank")


def test_a_target_that_cannot_be_loaded_is_no_drafts_fault(models: Models) -> None:
    load_options = {"memory_budget": "1MiB", "threads": 1}
    with pytest.raises(RankingError, match="smallest budget"):
        rank_drafts(
            str(models.target), [str(models.draft)], ["x"], measure_here,
            max_tokens=2, load_options=load_options, sampling={},
        )  # fmt: skip

"""The --exact option: in plans and results, and its refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command_line import Models, expect_error, save_models

from backends.hf.self_test import TorchExactness
from backends.hf.source import HfSource
from specdec.__main__ import main
from specdec.planning.plan import plan_run

ODD = TorchExactness(False, "its sums are odd")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("exact"))


@pytest.fixture
def _odd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no checkpoint exact here."""
    monkeypatch.setattr(HfSource, "exactness", ODD)


def plan_argv(models: Models, *more: str) -> list[str]:
    return ["plan", "-m", str(models.target), "--threads", "1", *more]


def json_of(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    actual: dict[str, Any] = json.loads(capsys.readouterr().out)
    return actual


@pytest.mark.parametrize("exact", ["auto", "on"])
def test_a_plan_is_exact_without_being_asked(
    exact: str, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json_of(capsys, plan_argv(models, "--exact", exact))
    assert (plan["is_exact"], plan["not_exact_because"]) == (True, None)
    assert main(plan_argv(models)) == 0
    assert "\nexact to the bit: " in capsys.readouterr().out


def test_switched_off_it_says_so(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json_of(capsys, plan_argv(models, "--exact", "off"))
    assert (plan["is_exact"], plan["not_exact_because"]) == (False, "--exact off")
    assert main(plan_argv(models, "--exact", "off")) == 0
    assert "\nnot exact to the bit: --exact off\n" in capsys.readouterr().out


@pytest.mark.usefixtures("_odd")
def test_demanded_where_it_cannot_be_it_is_refused(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ("exact is 'on', but its sums are odd", "'auto' runs all the same")
    expect_error(capsys, plan_argv(models, "--exact", "on"), *parts)
    expect_error(capsys, models.run_argv("-p", "ab", "-n", "2", "--exact", "on"), *parts)
    plan = plan_run(str(models.target), threads=1)
    assert plan.to_dict()["not_exact_because"] == "its sums are odd"


def test_a_result_says_whether_it_is_exact(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = models.run_argv("-p", "ab", "-n", "4")
    for more, is_exact in (
        ((), True),
        (("--temperature", "1", "--seed", "3"), True),
        (("--exact", "off"), False),
        (("--accept-threshold", "0.4"), False),
        (("--temperature", "1", "--acceptance", "rejection"), False),
    ):
        assert json_of(capsys, [*argv, *more])["stats"]["is_exact"] is is_exact, more


@pytest.mark.usefixtures("_odd")
def test_a_run_that_cannot_be_exact_is_reported(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = models.run_argv("-p", "ab", "-n", "4", "--json")
    note = "note: the output may differ from plain decoding's: its sums are odd"
    for more, is_reported in (((), True), (("--exact", "off"), False)):
        assert main([*argv, *more]) == 0
        out, err = capsys.readouterr()
        assert (note in err) == is_reported
        assert json.loads(out)["stats"]["is_exact"] is False


@pytest.mark.parametrize(
    "rule", [("--accept-threshold", "0.4"), ("--temperature", "1", "--acceptance", "block")]
)
def test_demanded_with_a_rule_that_chooses_other_tokens_it_is_refused(
    rule: tuple[str, ...], models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = models.run_argv("-p", "ab", "-n", "4", "--exact", "on", *rule)
    expect_error(capsys, argv, "--exact is 'on', but with", rule[-1], "use 'auto'")
    assert main([*argv, "--num-draft-tokens", "0"]) == 0  # the rule affects drafts only


def test_other_values_are_refused(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    expect_error(capsys, plan_argv(models, "--exact", "maybe"), "maybe")

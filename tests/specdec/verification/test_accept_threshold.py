"""The only lossy rule: tokens that it accepts or never accepts, and its label as lossy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command_line import Models, expect_error, save_models
from exact_rules import table_rows
from generating import RandomDrafter, ScriptedDrafter, make_controller, run
from hypothesis import given, settings
from hypothesis import strategies as st
from table_backend import TableBackend

from specdec.checks import ConfigError
from specdec.cli.app import main
from specdec.config import SpecConfig
from specdec.drafters.model import ModelDrafter
from specdec.planning.plan import plan_run
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.verification.acceptance import lenient, verify_match
from specdec.verification.tree import DraftTree

VOCAB = 5
ROWS = table_rows(VOCAB, seed=21)


def random_tree(seed: int) -> DraftTree:
    """Return a tree with ids outside the target's vocabulary, as from a draft's padding rows."""
    rng = np.random.default_rng(seed)
    tree = DraftTree(0)
    for _ in range(int(rng.integers(0, 25))):
        tree.add(int(rng.integers(len(tree))), int(rng.integers(VOCAB + 2)), -float(rng.random()))
    return tree


def own_choice(tree: DraftTree, seed: int):
    """Return the target's token after a node: any that its distribution permits."""

    def choose(node: int) -> int:
        prefix = tree.tokens_on_path(node)
        return int(np.random.default_rng([seed, *prefix]).choice(VOCAB, p=ROWS(prefix)))

    return choose


thresholds = st.floats(0.01, 1.0)
seeds = st.integers(0, 10_000)


@settings(max_examples=200, deadline=None)
@given(seeds, seeds, thresholds)
def test_each_token_is_the_targets_own_or_the_likeliest_drafted_one(
    tree_seed: int, choice_seed: int, threshold: float
) -> None:
    tree = random_tree(tree_seed)
    choose = own_choice(tree, choice_seed)
    probs = lambda node: ROWS(tree.tokens_on_path(node))  # noqa: E731
    outcome = verify_match(tree, lenient(tree, choose, probs, threshold))
    for node, token in zip(outcome.path, outcome.emitted(tree), strict=True):
        own, p = choose(node), probs(node)
        drafted = {item: p[item] for item in tree.children(node) if item < VOCAB}
        enough = {item for item, chance in drafted.items() if chance >= threshold}
        if own in drafted or not enough:
            assert token == own
        else:
            assert token in enough
            assert p[token] == max(drafted.values())


@settings(max_examples=50, deadline=None)
@given(seeds, seeds, thresholds)
def test_it_never_accepts_less_than_the_lossless_rule_up_to_where_they_part(
    tree_seed: int, choice_seed: int, threshold: float
) -> None:
    tree = random_tree(tree_seed)
    choose = own_choice(tree, choice_seed)
    probs = lambda node: ROWS(tree.tokens_on_path(node))  # noqa: E731
    lossless = verify_match(tree, choose)
    lossy = verify_match(tree, lenient(tree, choose, probs, threshold))
    assert lossy.path[: len(lossless.path)] == lossless.path
    assert verify_match(tree, lenient(tree, choose, probs, 1.0)) == lossless


def lossy(threshold: float) -> SpecConfig:
    return SpecConfig(num_draft_tokens=12, draft_depth=6, accept_threshold=threshold)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_threshold_of_one_is_plain_decoding(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=4)
    plain = run(TableBackend(ROWS, VOCAB), [1, 2], 40, params=params)
    drafter = RandomDrafter(VOCAB, seed=2)
    assert run(TableBackend(ROWS, VOCAB), [1, 2], 40, drafter, params, spec=lossy(1.0)) == plain


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, seed=4)])
def test_a_low_threshold_takes_what_is_drafted_but_nothing_banned(params: SamplingParams) -> None:
    script = [1, 2, *[3] * 60]
    drafter = ScriptedDrafter(script, VOCAB)
    target = TableBackend(ROWS, VOCAB)
    text = run(target, [1, 2], 30, drafter, params, spec=lossy(1e-12))
    assert sum(token == 3 for token in text) >= 24  # a step of seven ends with one of its own
    banned = params.replace(suppress_tokens=(3,))
    assert 3 not in run(target, [1, 2], 30, drafter, banned, spec=lossy(1e-12))


def test_probabilities_are_those_after_the_processors() -> None:
    """This holds at temperature 0, too: the largest of them is taken."""
    target, draft = TableBackend(ROWS, VOCAB), TableBackend(table_rows(VOCAB, seed=22), VOCAB)
    params = SamplingParams(repetition_penalty=1.5)
    spec = SpecConfig(num_draft_tokens=4, draft_depth=3, tree_width=2, accept_threshold=0.2)
    controller = make_controller(target, ModelDrafter(draft, VOCAB), params, spec=spec)
    controller.start([1, 2])
    sampler, n_lossy = Sampler(params, n_tokens=VOCAB), 0
    for _ in range(40):
        context = list(controller.context)
        for token in controller.step(50).token_ids:
            log_p = sampler.log_probs(context, target.logits(context))
            if token != log_p.argmax():
                n_lossy += 1
                assert np.exp(log_p[token]) >= 0.2
            context.append(token)
    assert n_lossy > 0


def test_bad_combinations() -> None:
    for acceptance in ("rejection", "block"):
        with pytest.raises(ConfigError, match="use accept_threshold with 'match'"):
            SpecConfig(acceptance=acceptance, accept_threshold=0.3)
    for value in (0.0, -0.1, 1.01, float("nan"), "much"):
        with pytest.raises(ConfigError, match="accept_threshold is .*, must be a number above 0"):
            SpecConfig(accept_threshold=value)


def test_only_a_threshold_with_a_drafter_is_lossy() -> None:
    assert SpecConfig().is_lossless
    assert SpecConfig(acceptance="block").is_lossless
    assert SpecConfig(spec_type=(), accept_threshold=0.5).is_lossless
    assert not SpecConfig(accept_threshold=0.5).is_lossless


# --- reports --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


def test_a_run_says_that_it_is_lossy(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    argv = models.run_argv("-p", "ab", "-n", "4")
    lossy = [*argv, "--accept-threshold", "0.4"]
    assert main(lossy) == 0
    assert "LOSSY (--accept-threshold)" in capsys.readouterr().err.splitlines()[-1]
    for words, is_lossless in ((argv, True), (lossy, False)):
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["stats"]["is_lossless"] is is_lossless


def test_a_plan_says_that_it_is_lossy(models: Models) -> None:
    options = {"draft_model": str(models.draft), "threads": 1}
    lossy = plan_run(str(models.target), **options, accept_threshold=0.4)
    assert lossy.to_dict()["is_lossless"] is False
    assert "LOSSY: draft tokens of probability 0.4 and above" in "\n".join(lossy.lines())
    lossless = plan_run(str(models.target), **options)
    assert lossless.to_dict()["is_lossless"] is True
    assert "LOSSY" not in "\n".join(lossless.lines())


def test_the_help_says_that_it_is_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help-all"]) == 0
    assert "LOSSY" in capsys.readouterr().out


def test_the_command_line_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    run_it = ["run", "-m", "pair:target", "-p", "a"]
    expect_error(capsys, [*run_it, "--accept-threshold", "2"], "--accept-threshold is 2.0, must be")
    both = ["--acceptance", "block", "--accept-threshold", "0.5"]
    expect_error(capsys, [*run_it, *both], "use --accept-threshold with 'match'")
    expect_error(capsys, [*run_it, "--acceptance", "typical"], "must be one of match, rejection")

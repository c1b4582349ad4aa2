"""The promise: with any draft, exactly the target's own output, token by token."""

import numpy as np
import pytest
from alone import own
from exact_targets import exact_resident
from generating import RandomDrafter, ScriptedDrafter, make_controller, run

from backends.contract.backend import PREFIX
from backends.hf.backend import TorchBackend
from specdec.config import CHAIN_RULES, SpecConfig
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

N_PROMPTS, N_TOKENS = 12, 24


@pytest.fixture(scope="module")
def target(checkpoint_factory):
    with exact_resident(checkpoint_factory("llama")) as backend:
        yield backend


@pytest.fixture(scope="module")
def other(checkpoint_factory):
    with TorchBackend.resident(checkpoint_factory("llama", seed=1)) as backend:
        yield backend


@pytest.fixture(scope="module")
def twin(checkpoint_factory):
    with exact_resident(checkpoint_factory("llama")) as backend:
        yield backend


def prompts(n=N_PROMPTS):
    rng = np.random.default_rng(7)
    return [rng.integers(3, 96, size=int(rng.integers(2, 20))).tolist() for _ in range(n)]


@pytest.fixture(scope="module")
def plain_outputs(target):
    return [(prompt, run(target, prompt, N_TOKENS)) for prompt in prompts()]


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("kind", ["self", "other model", "random", "always wrong", "merged"])
def test_greedy_equals_plain_decoding(kind, target, twin, other, plain_outputs):
    make = {
        "self": lambda plain: ModelDrafter(twin, 96),
        "other model": lambda plain: ModelDrafter(other, 96),
        "random": lambda plain: RandomDrafter(96),
        "always wrong": lambda plain: ScriptedDrafter(plain, 96, wrong_at=0),
        "merged": lambda plain: MergedDrafter([ModelDrafter(other, 96), NgramDrafter()]),
    }[kind]
    for prompt, plain in plain_outputs:
        assert run(target, prompt, N_TOKENS, make(prompt + plain)) == plain


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_do_not_depend_on_the_draft(seed, target, twin, other):
    params = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=seed
    )
    for prompt in prompts(6):
        plain = run(target, prompt, N_TOKENS, params=params)
        for drafter, spec in (
            (ModelDrafter(twin, 96), SpecConfig(num_draft_tokens=20)),
            (ModelDrafter(other, 96), SpecConfig(num_draft_tokens=5, tree_width=2)),
            (RandomDrafter(96, seed), SpecConfig(num_draft_tokens=9)),
            (NgramDrafter(), SpecConfig(num_draft_tokens=3)),
        ):
            assert run(target, prompt, N_TOKENS, drafter, params, spec=spec) == plain


def test_a_perfect_draft_is_accepted_whole(target, twin):
    """The draft's own KV is correct, too: with itself as draft every step is fully accepted."""
    spec = SpecConfig(num_draft_tokens=4, tree_width=1, draft_depth=4)
    for prompt in prompts(10):
        own(target).rollback(0)
        drafter = ModelDrafter(twin, 96)
        drafter.reset()
        controller = make_controller(target, drafter, spec=spec)
        controller.start(prompt)
        for _ in range(5):
            assert controller.step(100).acceptance.n_accepted == 4


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, None])
def test_steps_end_at_the_first_wrong_draft_token(wrong_at, target):
    prompt = prompts(1)[0]
    plain = run(target, prompt, N_TOKENS)
    drafter = ScriptedDrafter(prompt + plain, 96, wrong_at)
    assert run(target, prompt, N_TOKENS, drafter) == plain
    assert set(drafter.accepted[:-1]) == {6 if wrong_at is None else wrong_at}


@pytest.fixture(scope="module")
def prompt_of_distinct_output(target):
    """A prompt whose output begins with nine distinct tokens."""
    sequences = ((prompt, run(target, prompt, N_TOKENS)) for prompt in prompts(50))
    return next((prompt, text) for prompt, text in sequences if len(set(text[:9])) == 9)


@pytest.mark.parametrize("offset", range(8))
def test_end_of_sequence_at_every_offset_of_an_accepted_run(
    offset, target, prompt_of_distinct_output
):
    """No token follows the end-of-sequence token, whichever it is."""
    prompt, plain = prompt_of_distinct_output
    drafter = ScriptedDrafter(prompt + plain, 96)
    eos = plain[1 + offset]
    assert run(target, prompt, N_TOKENS, drafter, eos=[eos]) == plain[: 2 + offset]


@pytest.mark.parametrize("n", range(1, 10))
def test_token_limit_at_every_offset(n, target):
    prompt = prompts(2)[1]
    plain = run(target, prompt, N_TOKENS)
    assert run(target, prompt, n, ScriptedDrafter(prompt + plain, 96)) == plain[:n]


@pytest.mark.parametrize("left", range(1, 8))
def test_context_is_never_exceeded(left, checkpoint_factory):
    with TorchBackend.resident(checkpoint_factory("llama"), max_context=20) as small:
        prompt = prompts(5)[4][:4] * 10
        prompt = prompt[: 20 - left]
        tokens = run(small, prompt, left, RandomDrafter(96, left))
        assert len(prompt) + len(tokens) == 20


def test_draft_with_a_shorter_context_stops_proposing(target, checkpoint_factory):
    prompt = prompts(1)[0]
    plain = run(target, prompt, N_TOKENS)
    with TorchBackend.resident(checkpoint_factory("llama"), max_context=len(prompt) + 8) as short:
        assert run(target, prompt, N_TOKENS, ModelDrafter(short, 96)) == plain


def test_draft_vocabulary_larger_than_the_targets(target, checkpoint_factory):
    prompt = prompts(1)[0]
    plain = run(target, prompt, N_TOKENS)
    directory = checkpoint_factory("llama", vocab_size=128)
    with TorchBackend.resident(directory) as wide:
        assert run(target, prompt, N_TOKENS, ModelDrafter(wide, 96)) == plain


def test_padding_rows_of_the_vocabulary_are_never_chosen(target):
    """Ids from the tokenizer's length on are masked, greedy and sampled."""
    logits = np.zeros(96, dtype=np.float32)
    logits[90] = 50.0
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1), n_tokens=80)
        assert sampler.choose([1], logits, 1) < 80


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_rule_for_chains_accepts_itself_and_stays_in_range(rule, target, twin):
    params = SamplingParams(temperature=1.0, seed=5)
    sampler = Sampler(params, n_tokens=96)
    rng = np.random.default_rng(3)
    drafter = ModelDrafter(twin, 96, chain=(sampler, rng))
    spec = SpecConfig(num_draft_tokens=4, acceptance=rule)
    own(target).rollback(0)
    drafter.reset()
    controller = make_controller(target, drafter, params, spec=spec, rng=rng)
    controller.start([5, 6, 7])
    accepted = [controller.step(50).acceptance.n_accepted for _ in range(8)]
    assert accepted == [4] * 8  # p and q are bit-equal


def test_a_cancel_inside_a_pass_leaves_the_prefix(target, monkeypatch):
    prompt = prompts(1)[0]
    plain = run(target, prompt, N_TOKENS)
    own(target).rollback(0)
    controller = make_controller(target, RandomDrafter(96))
    controller.start(prompt)
    runner = target._runner.layers[1]
    forward = runner._forward

    def interrupted(*args, **kwargs):
        runner._forward = forward
        raise KeyboardInterrupt

    runner._forward = interrupted
    n_committed = own(target).n_committed
    with pytest.raises(KeyboardInterrupt):
        controller.step(10)
    assert own(target).n_committed == n_committed
    _, logits = own(target).extend([plain[0]], [PREFIX])
    assert int(logits[0].argmax()) == plain[1]

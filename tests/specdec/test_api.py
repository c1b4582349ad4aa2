"""The Python API end to end: load, generate, stream, at budgets that force streaming."""

import json

import numpy as np
import pytest
import torch
from stepping import Stepping
from tiny_pair import save_model
from transformers import AutoModelForCausalLM, GenerationConfig

import specdec
from offload.budget import BudgetExceeded
from offload.errors import SpecdecError
from offload.units import MIB
from specdec.checks import ConfigError
from specdec.config import SpecConfig
from specdec.drafters.base import Drafter
from specdec.verification.tree import DraftTree

PROMPT = "def add(a, b):"
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24}  # 100 MB in fp32


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"), seed=0, max_position_embeddings=512)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def llm(target, draft):
    with specdec.load(target, draft, ctx_size=256) as loaded:
        yield loaded


def test_stream_gives_the_text_of_generate(llm):
    stream = llm.stream(PROMPT, max_tokens=20)
    chunks = list(stream)
    result = llm.generate(PROMPT, max_tokens=20)
    assert "".join(chunk.text for chunk in chunks) == stream.result.text == result.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == result.token_ids
    assert len(result.token_ids) == result.stats.generated_tokens == 20
    assert result.finish_reason == "length"


def test_greedy_is_what_transformers_generates(llm, target):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = llm.tokenizer.encode(PROMPT)
    config = GenerationConfig(
        max_new_tokens=24, do_sample=False, repetition_penalty=1.2, no_repeat_ngram_size=3
    )
    expected = model.generate(torch.tensor([ids]), generation_config=config, pad_token_id=0)
    result = llm.generate(PROMPT, generation_config=config)
    assert list(result.token_ids) == expected[0, len(ids) :].tolist()


@pytest.mark.slow
def test_every_stop_position_cuts_the_output_there(target):
    """The target is its own draft, so that stops fall inside accepted runs, at every offset."""
    size = {"num_draft_tokens": 64, "tree_width": 32}
    with specdec.load(target, target, ctx_size=256, **size) as llm:
        letters = {t: llm.tokenizer.decode([t]) for t in range(llm.tokenizer.n_tokens)}
        other = [t for t, text in letters.items() if not (text.isprintable() and text.isascii())]
        other += [t for t, text in letters.items() if not text]
        options = {"max_tokens": 24, "suppress_tokens": other, "repetition_penalty": 1.5}
        whole = llm.generate(PROMPT, **options)
        assert whole.stats.accepted_tokens >= 8
        assert len(whole.text) == 24
        for start in range(1, 22):
            stop = whole.text[start : start + 2]
            result = llm.generate(PROMPT, stop=[stop], **options)
            assert result.text == whole.text[: whole.text.index(stop)]
            assert result.finish_reason == "stop"
            assert result.stats.generated_tokens == len(result.token_ids)
            assert result.stats.accepted_tokens <= len(result.token_ids)


def test_logprobs_are_the_models_own(llm, target):
    result = llm.generate(PROMPT, max_tokens=12, temperature=0.8, seed=1, logprobs=True)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = llm.tokenizer.encode(PROMPT) + list(result.token_ids)
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    start = len(ids) - len(result.token_ids)
    expected = [log_p[i - 1, ids[i]] for i in range(start, len(ids))]
    assert np.abs(np.array(result.logprobs) - expected).max() < 1e-4


def test_a_seed_gives_the_same_tokens_with_and_without_draft(llm):
    for seed in range(5):
        options = {"max_tokens": 24, "temperature": 1.0, "top_p": 0.9, "seed": seed}
        plain = llm.generate(PROMPT, speculative=False, **options)
        fixed = specdec.SpecConfig(
            num_draft_tokens=2
        )  # the policy may find that drafting does not pay
        speculative = llm.generate(PROMPT, spec=fixed, **options)
        assert plain.token_ids == speculative.token_ids
        assert plain.stats.drafted_tokens == 0 < speculative.stats.drafted_tokens


def test_no_seed_means_another_one_each_time(llm):
    sequences = {llm.generate(PROMPT, max_tokens=16, temperature=1.5).token_ids for _ in range(4)}
    assert len(sequences) > 1


def test_cancel_keeps_what_was_generated(llm):
    stream = llm.stream(PROMPT, max_tokens=100)
    with Stepping(llm) as steps:
        first = steps.next(stream)
        steps.cancel(stream)
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.token_ids == first.token_ids
    assert list(stream) == []
    assert llm.generate(PROMPT, max_tokens=5).finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [("", "empty"), ("x" * 300, "leaves no room"), ([5, 10_000], "outside the vocabulary")],
)
def test_bad_prompts(llm, prompt, problem):
    with pytest.raises(SpecdecError, match=problem):
        llm.generate(prompt)


def test_unknown_option_is_named(llm):
    with pytest.raises(SpecdecError, match="temprature"):
        llm.generate(PROMPT, temprature=1.0)


def test_a_full_context_ends_the_sequence(llm):
    result = llm.generate("x" * 250, max_tokens=100)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 256 - 250


@pytest.mark.slow
def test_rejection_rule_end_to_end(target, draft):
    """Seeds repeat if the length of chains is fixed; the policy's own length depends on timings."""
    fixed = {"acceptance": "rejection", "num_draft_tokens": 6}
    with specdec.load(target, draft, ctx_size=256, **fixed) as llm:
        options = {"max_tokens": 30, "temperature": 1.0, "seed": 3}
        first, again = (llm.generate(PROMPT, **options) for _ in range(2))
        assert first.token_ids == again.token_ids
    with specdec.load(target, draft, ctx_size=256, acceptance="rejection") as llm:
        greedy = llm.generate(PROMPT, max_tokens=30)
        assert greedy.token_ids == llm.generate(PROMPT, max_tokens=30, speculative=False).token_ids


@pytest.mark.slow
def test_the_same_output_at_every_budget(tmp_path, draft):
    """The model streams almost wholly, in part, and not at all."""
    wide = save_model(tmp_path, seed=2, **WIDE)
    options = {"ctx_size": 128, "num_draft_tokens": 8}
    outputs, streamed = set(), []
    for more_bytes in (12 * MIB, 48 * MIB, 1 << 30):
        plan = specdec.plan_run(wide, draft, memory_budget="8GiB", **options)
        budget = plan.smallest_budget_bytes + more_bytes
        with specdec.load(wide, draft, memory_budget=budget, **options) as llm:
            plain = llm.generate(PROMPT, max_tokens=8, speculative=False)
            sampled = llm.generate(PROMPT, max_tokens=8, temperature=1.0, seed=4)
            outputs.add((plain.token_ids, sampled.token_ids))
            streamed.append(plain.stats.bytes_streamed)
    assert len(outputs) == 1
    assert streamed[0] > streamed[1] > streamed[2] == 0


def test_a_budget_too_small_names_one_that_works(target, draft):
    with pytest.raises(BudgetExceeded, match="smallest budget that works is") as caught:
        specdec.load(target, draft, memory_budget="300MiB")
    enough = caught.value.smallest_budget_bytes
    with specdec.load(target, draft, memory_budget=enough) as llm:
        assert len(llm.generate(PROMPT, max_tokens=3).token_ids) == 3


def test_trees_wider_than_the_reserved_memory_are_refused(target, draft):
    with specdec.load(target, draft, ctx_size=256, num_draft_tokens=8, tree_width=100) as llm:
        plain = llm.generate(PROMPT, max_tokens=12, speculative=False).token_ids
        for width in (1, 100):
            spec = SpecConfig(num_draft_tokens=8, tree_width=width)
            assert llm.generate(PROMPT, max_tokens=12, spec=spec).token_ids == plain
        with pytest.raises(ConfigError, match=r"memory for 100: load them with tree_width=101"):
            llm.generate(PROMPT, spec=SpecConfig(num_draft_tokens=8, tree_width=101))


def test_a_budget_above_the_machine_is_refused(target):
    with pytest.raises(
        SpecdecError, match=r"above the limit of this process.*lower memory_budget to that"
    ):
        specdec.load(target, memory_budget="900TiB")


def test_two_streams_in_turns(llm):
    """Each continues its own output."""
    expected = [llm.generate(prompt, max_tokens=12).token_ids for prompt in ("import os", PROMPT)]
    streams = [llm.stream(prompt, max_tokens=12) for prompt in ("import os", PROMPT)]
    open_ones = list(streams)
    while open_ones:
        open_ones = [stream for stream in open_ones if next(stream, None) is not None]
    assert [stream.result.token_ids for stream in streams] == expected


def test_closing_frees_the_model(target):
    llm = specdec.load(target, ctx_size=64)
    llm.generate(PROMPT, max_tokens=2)
    llm.close()
    llm.close()
    assert llm.target.kv_bytes == 0


def test_hub_ids_come_from_the_local_cache(target, tmp_path, monkeypatch):
    """huggingface_hub's layout: blobs, and a snapshot of links to them."""
    repo = tmp_path / "models--someone--tiny"
    snapshot = repo / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    for number, file in enumerate(sorted(target.iterdir())):
        blob = repo / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with specdec.load("someone/tiny", ctx_size=128) as llm:
        assert len(llm.generate(PROMPT, max_tokens=3).token_ids) == 3
    with pytest.raises(SpecdecError, match="someone/other is neither a model on this disk nor"):
        specdec.load("someone/other")


class Oracle(Drafter):
    """A drafter that knows the output, so that it is always right."""

    def __init__(self, text):
        self.text, self.n_resets = text, 0

    def propose(self, context_ids, limits):
        tree, node = DraftTree(context_ids[-1]), 0
        for token in self.text[len(context_ids) :][: min(limits.max_nodes, limits.max_depth)]:
            node = tree.add(node, token, -0.1)
        return tree

    def reset(self):
        self.n_resets += 1


def test_a_drafter_of_ones_own(llm):
    prompt = llm.tokenizer.encode(PROMPT)
    plain = llm.generate(prompt, speculative=False, max_tokens=21, ignore_eos=True)
    oracle = Oracle([*prompt, *plain.token_ids])
    spec = SpecConfig(("ngram",), num_draft_tokens=3, tree_width=1, draft_depth=3)
    result = llm.generate(prompt, spec=spec, drafter=oracle, max_tokens=21, ignore_eos=True)
    assert result.token_ids == plain.token_ids
    assert result.stats.passes == 5
    assert [time.num_tokens for time in result.stats.pass_times] == [4] * 5
    assert oracle.n_resets == 2  # before its output, and behind it


@pytest.mark.parametrize("plainly", [{"speculative": False}, {"spec": SpecConfig(())}])
def test_a_drafter_and_plain_decoding_contradict(llm, plainly):
    with pytest.raises(SpecdecError, match="plain decoding"):
        llm.generate(PROMPT, drafter=Oracle([]), **plainly)


@pytest.mark.parametrize("rule", ["match", "block"])
def test_a_chain_has_as_many_tokens_as_the_user_fixed(rule, target):
    """The planned times would make it shorter: the draft is as slow as the target."""
    options = {"num_draft_tokens": 12, "tree_width": 1, "spec_type": "draft", "acceptance": rule}
    sampling = {"temperature": 2.0, "seed": 1} if rule == "block" else {}
    with specdec.load(target, target, ctx_size=128, threads=1, **options) as llm:
        stats = llm.generate([5, 6, 7], max_tokens=60, ignore_eos=True, **sampling).stats
    assert stats.pass_times[0].num_tokens == 1 + 12


@pytest.mark.slow_except(2)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampling": {"max_tokens": 2}}, "must be SamplingParams or None"),
        ({"spec": 5}, "spec is 5, must be SpecConfig or None"),
        ({"drafter": 5}, "drafter is 5, must be Drafter or None"),
        ({"speculative": "no"}, "speculative is 'no', must be bool"),
        ({"logits_processors": 5}, "logits_processors is 5, must be Sequence"),
        ({"logits_processors": [5]}, "one of logits_processors is 5, must be Callable"),
        ({"generation_config": 5}, "generation_config is 5, must be a GenerationConfig"),
        ({"stop": 5}, "stop is 5, must be str or list or tuple"),
        ({"stop": ""}, "every stop must be a non-empty string"),
    ],
)
def test_arguments_of_another_type_are_named(target, draft, wrong, message):
    with specdec.load(target, draft, ctx_size=64) as llm, pytest.raises(ConfigError, match=message):
        llm.generate(PROMPT, **wrong)


def test_results_are_plain_values(llm):
    result = llm.generate("abc", max_tokens=3, n=2, temperature=1.0, seed=1, logprobs=2)
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored["text"] == result.text
    assert [output["token_ids"] for output in stored["outputs"]] == [
        list(output.token_ids) for output in result.outputs
    ]
    assert len(stored["outputs"][0]["top_logprobs"][0]) >= 2
    assert "score" not in stored["outputs"][0]
    assert stored["stats"]["generated_tokens"] == result.stats.generated_tokens
    assert stored["prompt_token_ids"] == list(result.prompt_token_ids)


def test_chunks_are_plain_values(llm):
    for chunk in llm.stream("abc", max_tokens=3):
        assert json.loads(json.dumps(chunk.to_dict())) == {
            "text": chunk.text,
            "token_ids": list(chunk.token_ids),
            "index": 0,
        }


def test_the_repr_says_what_is_loaded(target, draft):
    with specdec.load(target, draft, ctx_size=64, memory_budget="2GiB") as llm:
        shown = repr(llm)
        assert shown.startswith(f"<specdec.LLM {str(target)!r}, draft_model={str(draft)!r}, ")
        assert "memory_budget='2.00 GiB', device='cpu', ctx_size=64>" in shown
    assert repr(llm).endswith("ctx_size=64, closed>")

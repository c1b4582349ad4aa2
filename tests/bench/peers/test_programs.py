"""The programs themselves, in this process, on tiny models: equal tokens, correct counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tiny_pair import save_model

from bench.peers.program import Clock, Journal, Task, bytes_read, run_program
from bench.prompts.workloads import Prompt
from offload.units import GIB

PROMPTS = (Prompt("a", "def f(x):", "code"), Prompt("b", "return", "code"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with the target's weights: every guess is right."""
    return save_model(tmp_path_factory.mktemp("programs") / "draft", seed=1)


@pytest.fixture
def run(tmp_path: Path, target: Path) -> Callable[..., dict[str, Any]]:
    """run(program, draft, **task) -> its journal."""

    def start(program: Any, draft: Path | None = None, **more: Any) -> dict[str, Any]:
        values = {
            "model": str(target), "draft": None if draft is None else str(draft),
            "prompts": PROMPTS, "n_tokens": 12, "seconds": 60.0, "memory_bytes": 4 * GIB,
            "n_threads": 1, "n_ctx": 128, "ignore_eos": True,
        }  # fmt: skip
        task = Task(**{**values, **more})
        task.write(tmp_path / "task.json")
        assert Task.read(tmp_path / "task.json") == task
        journal = tmp_path / "journal.jsonl"
        journal.unlink(missing_ok=True)
        code = run_program([str(tmp_path / "task.json"), str(journal)], program)
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        actual = {kind: value for line in lines for kind, value in line.items()}
        assert code == (1 if "error" in actual else 0)
        return {**actual, "prompts": [line["prompt"] for line in lines if "prompt" in line]}

    return start


def specdec_tokens(run: Callable[..., dict[str, Any]]) -> list[list[int]]:
    from bench.peers.specdec import program

    journal = run(program, options={"spec_type": "none"})
    return [record["token_ids"] for record in journal["prompts"]]


def test_specdec_plain_and_with_a_draft(run: Callable[..., dict[str, Any]], draft: Path) -> None:
    from bench.peers.specdec import program

    plain = run(program, options={"spec_type": "none"})
    drafted = run(program, draft, options={"num_draft_tokens": 4})
    for item, other in zip(plain["prompts"], drafted["prompts"], strict=True):
        assert item["token_ids"] == other["token_ids"]
        assert [n for _, n in item["arrivals"]] == [1] * 12
        assert sum(n for _, n in other["arrivals"]) == 12
        assert len(other["arrivals"]) < 12
        assert other["stats"]["accepted_by_depth"][0] > 0
        assert (item["category"], item["ended"]) == ("code", "whole")
    assert drafted["loaded"]["settings"]["plan"]["memory_budget_bytes"] == 4 * GIB
    assert drafted["done"]["peak_rss_bytes"] > 0


def test_specdec_is_limited_to_its_plan(run: Callable[..., dict[str, Any]], draft: Path) -> None:
    from bench.peers.specdec import program

    for spec_type, drafts in (("none", False), ("draft", True)):
        options = {"spec_type": spec_type, "num_draft_tokens": 3, "predict": True}
        journal = run(program, draft, options=options)
        actual = journal["prediction"]
        assert (actual["num_tokens"] > 1) == drafts
        assert (actual["tokens_per_pass"] > 1) == drafts  # the draft is the target itself
        assert set(actual["predicted"]) == set(actual["measured"])
        for name, error in actual["error"].items():
            assert error == pytest.approx(actual["predicted"][name] / actual["measured"][name] - 1)
        assert journal["storage_bytes_per_second_after"] > 0
        assert len(journal["prompts"]) == 2


def test_specdec_samples_as_asked(run: Callable[..., dict[str, Any]], draft: Path) -> None:
    from bench.peers.specdec import program

    sampling = {"temperature": 1.5, "seed": 3}
    plain = run(program, options={"spec_type": "none", "sampling": sampling})
    drafted = run(program, draft, options={"num_draft_tokens": 4, "sampling": sampling})
    outputs = [[record["token_ids"] for record in item["prompts"]] for item in (plain, drafted)]
    assert outputs[0] == outputs[1] != specdec_tokens(run)


def test_specdec_with_the_head_in_its_target(run: Callable[..., dict[str, Any]]) -> None:
    from bench.peers.specdec import program

    target = {"model": "pair:hybrid"}
    plain = run(program, options={"spec_type": "none"}, **target)
    drafted = run(program, Path("mtp"), options={"num_draft_tokens": 4}, **target)
    for item, other in zip(plain["prompts"], drafted["prompts"], strict=True):
        assert item["token_ids"] == other["token_ids"]
        assert other["stats"]["accepted_tokens"] > 0
    assert drafted["loaded"]["settings"]["draft_model"] == "mtp"


def test_accelerate_from_disk_alone_and_assisted(
    run: Callable[..., dict[str, Any]], draft: Path
) -> None:
    pytest.importorskip("accelerate")
    from bench.peers.accelerate import program

    expected = specdec_tokens(run)
    size = sum(path.stat().st_size for path in draft.glob("*.safetensors"))
    # The embedding must fit: transformers 5.23 drafts on the device of a model's first weights.
    options = {"cpu_memory_bytes": size * 2 // 3}
    alone, assisted = run(program, options=options), run(program, draft, options=options)
    for journal in (alone, assisted):
        assert "error" not in journal
        assert journal["loaded"]["settings"]["disk_modules"] > 0
        assert [record["token_ids"] for record in journal["prompts"]] == expected
    assert [n for _, n in alone["prompts"][0]["arrivals"]] == [1] * 12
    assert len(assisted["prompts"][0]["arrivals"]) < 12


def test_an_assistant_gets_the_targets_rows(tmp_path: Path) -> None:
    import torch

    from bench.peers.accelerate import load_assistant

    small = save_model(tmp_path / "small", seed=3)
    assistant = load_assistant(small, 300)
    assert assistant.config.vocab_size == 300
    ids = torch.tensor([[5, 6, 7]])
    logits = assistant(ids).logits[0, -1]
    assert logits.shape == (300,)
    assert torch.equal(logits[259:], logits[258].expand(41))


def test_airllm_is_driven_as_documented(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """AirLLM is replaced by a stand-in with its interface, over transformers."""
    from bench.peers.airllm import program

    seen: dict[str, Any] = {}

    class AutoModel:
        @classmethod
        def from_pretrained(cls, path: str, **options: Any) -> Any:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            seen.update(options)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=options["dtype"])
            model.tokenizer = AutoTokenizer.from_pretrained(path)
            model.prefetching = False  # as where it cannot
            return model

    module = ModuleType("airllm")
    module.AutoModel = AutoModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "airllm", module)
    journal = run(program, options={"rewritten": str(tmp_path)})
    assert seen["layer_shards_saving_path"] == str(tmp_path)
    assert (seen["device"], seen["max_seq_len"]) == ("cpu", 128)
    assert journal["loaded"]["settings"]["prefetching"] is False
    assert [record["token_ids"] for record in journal["prompts"]] == specdec_tokens(run)


def test_airllm_itself(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The model is split first, without a prompt; AirLLM then decodes specdec's tokens."""
    pytest.importorskip("airllm")
    from bench.peers.airllm import program

    place = tmp_path / "shards"
    options = {"rewritten": str(place)}
    assert "error" not in run(program, prompts=(), options=options)
    written = {path: path.stat().st_mtime_ns for path in place.rglob("*.safetensors")}
    assert written
    # Few tokens: it collects garbage after every layer, and the test process has much of it.
    journal = run(program, prompts=PROMPTS[:1], n_tokens=4, options=options)
    assert "error" not in journal
    assert written == {path: path.stat().st_mtime_ns for path in written}
    [record] = journal["prompts"]
    assert record["token_ids"] == specdec_tokens(run)[0][:4]
    assert [n for _, n in record["arrivals"]] == [1] * 4


@pytest.mark.gguf
def test_llama_cpp_alone_and_with_a_draft(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp")
    from bench.peers.llama import program
    from specdec.models.names import resolve_model

    models: dict[str, Any] = {"model": str(resolve_model("pair:draft.gguf")), "n_tokens": 24}
    alone = run(program, **models, n_ctx=1024)
    settings = alone["loaded"]["settings"]
    assert settings["use_extra_bufts"] is False
    assert (settings["n_batch"], settings["n_ubatch"]) == (1024, 512)

    def arrivals(max_count: int, minimum: float) -> list[list[int]]:
        options = {"max_draft_tokens": max_count, "min_draft_probability": minimum}
        drafted = run(program, Path(models["model"]), **models, options=options)
        assert [r["token_ids"] for r in alone["prompts"]] == [
            r["token_ids"] for r in drafted["prompts"]
        ]
        assert options.items() <= drafted["loaded"]["settings"].items()
        return [[n for _, n in record["arrivals"]] for record in drafted["prompts"]]

    # The model is its own draft: every guess is right, and a threshold of 0 accepts all.
    assert arrivals(3, 0.0) == [[1, 4, 4, 4, 4, 4, 3]] * 2
    assert arrivals(16, 0.0) == [[1, 17, 6]] * 2
    assert all(len(arrival) < 24 for arrival in arrivals(16, 0.75))
    assert arrivals(16, 1.1) == [[1] * 24] * 2  # the threshold is never reached: plain decoding


@pytest.mark.gguf
def test_a_draft_is_as_sure_as_among_the_ten_likeliest() -> None:
    pytest.importorskip("llama_cpp")
    from bench.peers.llama import probability_of_best

    row = np.zeros(1000, np.float32)
    row[7] = np.log(9.0)
    assert probability_of_best(row) == pytest.approx(0.5)  # 9 / (9 + 9 others)
    assert probability_of_best(row[:1]) == 1.0
    rng = np.random.default_rng(0)
    row = rng.normal(size=500).astype(np.float32) * 3
    top = np.sort(row.astype(np.float64))[::-1][:10]
    assert probability_of_best(row) == pytest.approx(np.exp(top[0]) / np.exp(top).sum())


def test_a_failure_is_one_line(run: Callable[..., dict[str, Any]]) -> None:
    def program(task: Task, journal: Journal) -> None:
        raise ValueError("two\nlines")

    assert run(program)["error"] == "ValueError: two lines"


def test_time_is_shared_among_the_prompts(run: Callable[..., dict[str, Any]]) -> None:
    def program(task: Task, journal: Journal) -> None:
        def decode(prompt: Prompt, clock: Clock) -> dict[str, Any]:
            while not clock.is_up and clock.n_tokens < task.n_tokens:
                clock.reach(1)
            return {"token_ids": []}

        journal.loaded({})
        journal.decode(decode)

    journal = run(program, seconds=0.0)
    assert journal["prompts"] == []  # no time left: nothing is started
    journal = run(program, seconds=1e-3, n_tokens=10**9)
    assert journal["prompts"][0]["ended"] == "time"
    journal = run(program, n_tokens=3)
    assert [record["ended"] for record in journal["prompts"]] == ["whole", "whole"]


def test_bytes_read_grow_with_reading() -> None:
    first = bytes_read()
    assert first is None or first >= 0

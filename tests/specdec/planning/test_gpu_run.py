"""GPU runs, from options to output: on a fake GPU, and on a real one if present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agent_session import always_pay
from fake_gpu import PEAK_BYTES, force_tiers, install_fake_gpu
from tiny_pair import save_model

import specdec
from backends.cuda.engine import cuda_problem
from specdec.cli.app import main

PROMPT = "def f(x): return x"
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(cuda_problem() is not None, reason=cuda_problem() or ""),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return save_model(root / "target", seed=1), save_model(root / "draft", seed=1)


FIXED = {"num_draft_tokens": 4}  # the policy may find that drafting does not pay, as is true here


def generate(target: Path, draft: Path | None, **options: Any) -> specdec.GenerationResult:
    with specdec.load(target, draft, ctx_size=128, **options) as llm:
        return llm.generate(PROMPT, max_tokens=16, temperature=0.8, seed=3, ignore_eos=True)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("draft_device", ["cpu", "cuda", "auto"])
def test_the_tokens_are_those_of_the_cpu(models, monkeypatch, draft_device):
    expected = generate(*models)
    limits = install_fake_gpu(monkeypatch)
    force_tiers(monkeypatch)
    actual = generate(
        *models, device="cuda", vram_budget="2GiB", draft_device=draft_device, **FIXED
    )
    assert actual.token_ids == expected.token_ids
    stats = actual.stats
    assert stats.bytes_streamed > 0
    assert stats.bytes_copied_to_device >= stats.bytes_streamed
    assert (stats.vram_peak_bytes, stats.vram_budget_bytes) == (PEAK_BYTES, 2 * 2**30)
    assert stats.accepted_tokens > 0
    # CUDA's own context is outside torch's limit.
    assert set(limits) == {2 * 2**30 - 512 * 2**20}
    assert len(limits) == {"cpu": 1, "cuda": 2}.get(draft_device, len(limits))


def test_a_model_that_fits_stays_on_the_gpu(models, monkeypatch):
    install_fake_gpu(monkeypatch)
    actual = generate(*models, device="auto")
    assert actual.token_ids == generate(*models).token_ids
    assert actual.stats.bytes_copied_to_device == actual.stats.bytes_streamed == 0


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("draft_device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("loaded", "asked"),
    [
        ({}, {"n": 2, "temperature": 0.8, "seed": 3}),
        ({}, {"logprobs": True}),
        ({"num_beams": 3}, {"num_beams": 3, "n": 2}),
        ({"draft_window": 16}, {}),
        ({}, {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3}),
    ],
    ids=["sequences", "logprobs", "beams", "window", "filters"],
)
def test_every_generation_mode_gives_the_cpus_tokens(
    models, monkeypatch, draft_device, loaded, asked
):
    def outputs(**options):
        with specdec.load(*models, ctx_size=128, **loaded, **options, **FIXED) as llm:
            return llm.generate(PROMPT, max_tokens=12, ignore_eos=True, **asked).outputs

    expected = outputs()
    install_fake_gpu(monkeypatch)
    force_tiers(monkeypatch)
    actual = outputs(device="cuda", draft_device=draft_device)
    assert [item.token_ids for item in actual] == [item.token_ids for item in expected]


@pytest.mark.slow
@pytest.mark.parametrize("draft_device", ["cpu", "cuda"])
def test_a_sequence_continues_from_its_file_on_the_same_device(
    models, monkeypatch, tmp_path, draft_device
):
    """A prefix of a GPU is another one than of the CPU, which rounds otherwise. The draft has the
    target's weights here, so that the file of one on the CPU serves the target there, too."""
    install_fake_gpu(monkeypatch)
    always_pay(monkeypatch)
    force_tiers(monkeypatch)
    saving = {"ctx_size": 128, "prompt_cache_dir": tmp_path / "kv", **FIXED}
    gpu = {"device": "cuda", "draft_device": draft_device}
    asked = {"max_tokens": 12, "ignore_eos": True}
    with specdec.load(*models, **saving, **gpu) as llm:
        stream = llm.stream(PROMPT, **asked)
        next(stream)
        next(stream)
        stream.cancel()
        expected = llm.generate(PROMPT, cache_prompt=False, **asked)
    for where, is_reused in ((gpu, True), ({"exact": "off"}, draft_device == "cpu")):
        with specdec.load(*models, **saving, **where) as llm:
            actual = llm.generate(PROMPT, **asked)
            assert actual.token_ids == expected.token_ids
            assert (actual.stats.reused_prompt_tokens > 0) == is_reused


def test_what_is_printed_tells_of_the_gpu(models, monkeypatch, capsys):
    install_fake_gpu(monkeypatch)
    force_tiers(monkeypatch)
    names = ["-m", str(models[0]), "-md", str(models[1]), "-c", "128", "--device", "cuda"]
    names += ["--spec-type", "draft,ngram"]  # a plan may leave out a draft of its target's size
    assert main(["plan", *names, "--vram-budget", "2GiB"]) == 0
    out = capsys.readouterr().out
    for part in (
        "VRAM budget 2.00 GiB (as asked)",
        "copied per pass through 2 slots",
        "draft: computed on the ",
        "copies to the GPU 1.00 GB/s",
        "smallest VRAM budget that works",
    ):
        assert part in out
    assert main(["plan", *names, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert sum(values["vram"].values()) == values["vram_budget_bytes"] == 6 * 2**30
    assert values["vram_budget_source"] == "what is free on fake"
    assert main(["run", *names, "-p", PROMPT, "-n", "8"]) == 0
    err = capsys.readouterr().err
    assert "GB copied | stall" in err
    assert "VRAM 0.00 of 6.00 GiB" in err


def test_too_little_vram_is_refused_with_what_would_do(models, monkeypatch, capsys):
    install_fake_gpu(monkeypatch)
    argv = ["run", "-m", str(models[0]), "-p", "x", "--device", "cuda", "--vram-budget", "64MiB"]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "but the VRAM budget has 64.00 MiB; the smallest budget that works is" in err
    smallest = err.rsplit("works is ", 1)[1].split(";")[0].strip().replace(" ", "")
    assert main([*argv[:-1], smallest, "-n", "4"]) == 0


@pytest.mark.parametrize(
    "draft_device", [pytest.param(d, marks=needs_cuda) for d in ("cpu", "cuda")]
)
def test_a_real_gpu_gives_the_same_tokens_within_its_budget(models, monkeypatch, draft_device):
    expected = generate(*models)
    force_tiers(monkeypatch)
    actual = generate(*models, device="cuda", vram_budget="2GiB", draft_device=draft_device)
    assert actual.token_ids == expected.token_ids
    assert actual.stats.bytes_copied_to_device >= actual.stats.bytes_streamed > 0
    assert 0 < actual.stats.vram_peak_bytes <= actual.stats.vram_budget_bytes


@pytest.mark.cuda
@pytest.mark.skipif(cuda_problem() is not None, reason=cuda_problem() or "")
def test_what_is_measured_of_a_real_gpu_is_plausible():
    import torch

    from backends.cuda.probe import cuda_memory, measure_copies_to_gpu
    from backends.feedforward.timing import measure_gpu_compute

    memory = cuda_memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert 1e8 < measure_copies_to_gpu() < 1e12
    curve = measure_gpu_compute(torch.float16, torch.device("cuda", 0))
    assert 0 < curve.seconds(1) <= curve.seconds(1024)

"""The GPU of a run: rules, and one-line refusals."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from command_line import expect_error
from paper_models import PaperModel, on_paper_gpus

from backends.contract.backend import UnsupportedModel
from backends.contract.curve import ComputeCurve
from backends.cuda import engine as cuda_engine
from backends.cuda import probe as cuda_probe
from backends.cuda.probe import CudaMemory
from offload.placement.placement import LayerWeights
from offload.units import GIB, MIB
from specdec.checks import ConfigError
from specdec.models.opened import OpenedModel, OpenedPair
from specdec.planning import candidate_cost
from specdec.planning.gpu import find_gpu, gpu_for, measure_with_gpu, placement
from specdec.planning.measurements import Measurements
from specdec.planning.memory.memory_plan import Shape
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.plan import make_plan
from specdec.run_options import RunOptions

TARGET = PaperModel("t", 4, MIB, can_use_gpu=True)
DRAFT = PaperModel("d", 2, MIB, can_use_gpu=True)
CURVE = ComputeCurve.linear(1e-12, 1e-15)
CPU_ONLY = PaperModel("g", 2, MIB)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "cuda_problem", lambda: None)
    memory = CudaMemory("Test GPU", 8 * GIB, 6 * GIB)
    monkeypatch.setattr(cuda_probe, "cuda_memory", lambda: memory)
    monkeypatch.setattr(cuda_probe, "measuring", nullcontext)
    on_paper_gpus(monkeypatch)


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "cuda_problem", lambda: "torch was built without CUDA")


def options(**given: object) -> RunOptions:
    return RunOptions("t", given.pop("draft", "d"), **given)  # type: ignore[arg-type]


def pair(target: PaperModel = TARGET, draft: PaperModel | None = DRAFT) -> OpenedPair:
    opened = None if draft is None else SimpleNamespace(source=draft)
    return OpenedPair(SimpleNamespace(source=target), opened)


def test_the_cpu_is_the_default():
    assert find_gpu(options(), pair()) is None


def test_all_that_is_free_is_taken_or_what_was_asked_for():
    actual = find_gpu(options(device="cuda"), pair())
    assert (actual.vram_bytes, actual.vram_source) == (6 * GIB, "what is free on Test GPU")
    actual = find_gpu(options(device="cuda", vram_budget="2GiB"), pair())
    assert (actual.vram_bytes, actual.vram_source) == (2 * GIB, "as asked")
    with pytest.raises(ConfigError, match="lower vram_budget to that"):
        find_gpu(options(device="cuda", vram_budget="7GiB"), pair())


def test_the_budget_is_the_whole_processs(monkeypatch):
    """Another model of the process has 5 GiB: the rest of the budget is left for this one."""
    memory = CudaMemory("Test GPU", 8 * GIB, GIB, used_bytes=5 * GIB)
    monkeypatch.setattr(cuda_probe, "cuda_memory", lambda: memory)
    actual = find_gpu(options(device="cuda"), pair())
    assert (actual.vram_bytes, actual.base_bytes) == (6 * GIB, 5 * GIB + 512 * MIB)
    memory_planner = MemoryPlanner(
        TARGET, None, options(device="cuda", draft=None, ctx_size=64), GIB, actual
    )
    memory_plan = memory_planner.divide(8 * GIB, Shape(8))
    assert dict(memory_plan.vram.table())["base"] == 5 * GIB + 512 * MIB
    assert memory_plan.smallest.vram_bytes > 5 * GIB + 512 * MIB


@pytest.mark.parametrize(
    ("where", "on_cpu", "on_gpu"),
    [("auto", True, True), ("cpu", True, False), ("cuda", False, True)],
)
def test_where_the_draft_may_run(where, on_cpu, on_gpu):
    actual = find_gpu(options(device="cuda", draft_device=where), pair())
    assert (actual.cpu_draft is DRAFT, actual.draft is DRAFT) == (on_cpu, on_gpu)


def test_a_draft_that_cannot_use_the_gpu_stays_on_the_cpu():
    actual = find_gpu(options(device="cuda"), pair(draft=CPU_ONLY))
    assert (actual.cpu_draft, actual.draft) == (CPU_ONLY, None)
    with pytest.raises(UnsupportedModel, match="runs on the CPU only, .*: leave draft_device out$"):
        find_gpu(options(device="cuda", draft_device="cuda"), pair(draft=CPU_ONLY))
    with pytest.raises(UnsupportedModel, match="runs on the CPU only, .*: use device='cpu'$"):
        find_gpu(options(device="cuda"), pair(CPU_ONLY))
    with pytest.raises(UnsupportedModel, match=": plan for a device without a GPU$"):
        gpu_for(options(), pair(CPU_ONLY), GIB, "as asked", 0, "plan for a device without a GPU")


@pytest.mark.parametrize("given", ["--vram-budget 8GiB", "--draft-device cuda"])
def test_a_remedy_has_the_names_of_the_command_line(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = given.split()[0]
    remedy = f"give --device cuda and a checkpoint, or leave {option} out"
    argv = ["plan", "-m", "pair:target", *given.split()]
    expect_error(capsys, argv, "(--device is cpu): ", remedy)


def test_a_draft_head_needs_its_target_on_the_cpu():
    own, head = PaperModel("t", 4, MIB, can_use_gpu=True), PaperModel("h", 1, MIB)
    head.hidden_state_bytes = 64
    with pytest.raises(UnsupportedModel, match="a draft head, .* CPU only: use device='cpu', or"):
        find_gpu(options(device="cuda", draft="mtp"), pair(own, head))


def test_bf16_on_a_card_without_it_is_reported(monkeypatch):
    memory = CudaMemory("Old GPU", 8 * GIB, 6 * GIB, computes_bf16=False)
    monkeypatch.setattr(cuda_probe, "cuda_memory", lambda: memory)
    asked = options(device="cuda", draft=None, ctx_size=64)
    for number_format, n_warnings in (("BF16", 1), ("F16", 0)):
        target = PaperModel("t", 4, MIB, can_use_gpu=True)
        target.layers = tuple(
            LayerWeights(
                tuple(
                    replace(r, dtype=number_format, shape=(2, r.n_bytes // 4))
                    for r in layer.tensors
                )
            )
            for layer in target.layers
        )
        both = pair(target, None)
        gpu = find_gpu(asked, both)
        measurements = Measurements(
            1e9, PaperModel("t", 1, 1, curve=CURVE).measure_compute(), None, None, 1e9
        )
        plan = make_plan(asked, both, measurements, 8 * GIB, "as asked", GIB, gpu)
        assert len(plan.warnings) == n_warnings
        assert all(w.startswith("Old GPU has no arithmetic for bf16") for w in plan.warnings)


def test_auto_takes_the_gpu_for_models_that_it_can_run(monkeypatch):
    assert find_gpu(options(device="auto"), pair()) is not None
    assert find_gpu(options(device="auto"), pair(CPU_ONLY)) is None
    without_gpu(monkeypatch)
    assert find_gpu(options(device="auto"), pair()) is None


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(UnsupportedModel, match="use device='cpu'"):
        find_gpu(options(device="cuda"), pair(CPU_ONLY))
    without_gpu(monkeypatch)
    with pytest.raises(cuda_engine.NoDevice, match="torch was built without CUDA"):
        find_gpu(options(device="cuda"), pair())
    for given in ({"draft_device": "cuda"}, {"vram_budget": "2GiB"}):
        for device in ("cpu", "auto"):
            with pytest.raises(ConfigError, match="computed on the CPU"):
                find_gpu(options(device=device, **given), pair())


def test_a_draft_ranks_its_candidates_wherever_it_runs(monkeypatch):
    curve = ComputeCurve.linear(1e-9, 0.0)
    target, draft = (PaperModel(n, 2, MIB, curve=curve, can_use_gpu=True) for n in "td")
    both = pair(target, draft)
    ranking = ComputeCurve.linear(3.0, 1.0)
    monkeypatch.setattr(candidate_cost, "measure_candidates", lambda n_tokens: ranking)
    monkeypatch.setattr(cuda_probe, "measure_copies_to_gpu", lambda: 12e9)
    storage = SimpleNamespace(storage_bytes_per_second=1e9)
    monkeypatch.setattr("specdec.planning.gpu.measure_storage", lambda path: storage)
    monkeypatch.setattr(PaperModel, "weight_file", None)
    measurements = measure_with_gpu(both, gpu_for(options(device="cuda"), both, GIB, "as asked"))
    assert measurements.target.per_pass is None
    for item in (measurements.draft, measurements.gpu_draft):
        assert item.non_layer_seconds(2) == pytest.approx(5.0 + 1e-9 * draft.head_bytes)


def test_models_are_loaded_where_the_plan_says():
    on_gpu = PaperModel("t", 4, MIB, can_use_gpu=True)
    gpu = gpu_for(options(device="cuda"), pair(on_gpu), GIB, "as asked")
    opened = OpenedPair(*(OpenedModel(item, None, None, ()) for item in (TARGET, CPU_ONLY)))
    for device, draft in (("cpu", CPU_ONLY), ("cuda", DRAFT)):
        actual = placement(opened, gpu, device)
        assert (actual.target.source, actual.draft.source) == (on_gpu, draft)
    assert placement(opened, None, "cpu") is opened


def test_a_run_without_a_gpu_says_so_in_one_line(capsys, monkeypatch, tmp_path):
    from tiny_pair import save_model

    without_gpu(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(save_model(tmp_path / "model", seed=1))
    capsys.readouterr()
    for command in (["run", "-p", "x"], ["plan"]):
        argv = [*command, "-m", model, "--device", "cuda"]
        expect_error(capsys, argv, "device 'cuda' cannot be used: torch was built without CUDA")


def test_a_profile_of_a_gpu_is_a_device_to_plan_for(capsys, monkeypatch, tmp_path):
    from tiny_pair import save_model

    from backends.feedforward import timing as compute
    from specdec.cli.app import main
    from specdec.devices.file import find_device

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_probe, "measure_copies_to_gpu", lambda: 12e9)
    curve = ComputeCurve.linear(1e-12, 1e-13)
    monkeypatch.setattr(compute, "measure_gpu_compute", lambda dtype, device: curve)
    model = str(save_model(tmp_path / "model", seed=1))
    capsys.readouterr()
    assert main(["profile", "-m", model, "--device", "cuda", "--json"]) == 0
    profile = tmp_path / "gpu.json"
    profile.write_text(capsys.readouterr().out)
    device = find_device(str(profile))
    assert (device.vram_bytes, device.pcie_bytes_per_second) == (8 * GIB, 12e9)
    assert device.flops_per_second["F32"] == pytest.approx(2 / (4 * 1e-13))
    assert main(["plan", "-m", model, "--on", str(profile), "-c", "64"]) == 0
    out = capsys.readouterr().out
    assert "VRAM budget 8.00 GiB (all VRAM of gpu)" in out
    without_gpu(monkeypatch)
    expect_error(
        capsys, ["profile", "-m", model, "--device", "cuda"], "torch was built without CUDA"
    )


def test_a_format_that_torch_lacks_is_named(monkeypatch, tmp_path):
    from specdec.devices.spec import DeviceError
    from specdec.devices.this_machine import ThisGpu

    with pytest.raises(DeviceError, match="arithmetic in F8_E4M3 cannot be timed here"):
        ThisGpu(tmp_path, ["F8_E4M3"]).measure("F8_E4M3")

"""Checks of model, machine and llama.cpp before a backend is called exact."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from gguf_models import save_tiny_gguf

from backends.contract.curve import ComputeCurve
from backends.contract.exactness import EXACT_OFF, Exactness
from backends.contract.source import BackendOptions
from backends.ggml import batch_invariance
from backends.ggml.batch_invariance import fewer_outputs, find_min_batch_tokens
from backends.ggml.library import LOG, LlamaError
from backends.gguf import exactness
from backends.gguf.exactness import find_exact_run
from backends.gguf.hparams import KvLayer, KvShape
from backends.llama.context import ContextOptions
from backends.llama.source import GgufSource

pytestmark = pytest.mark.gguf
EIGHT = Exactness(True, min_batch_tokens=8)
LARGE = {"hidden": 256, "feed_forward": 256}  # for blocks of 256 numbers


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    pytest.importorskip("llama_cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run_of(model, type_k=None, type_v=None):
    return find_exact_run(model, 1, type_k, type_v)


# --- minimum number of rows -----------------------------------------------------------------------


def rows_with_kernels(kernel_of):
    """Rows whose values reveal the kernel that computed them."""

    def run(start, num_tokens):
        rows = np.arange(start, start + num_tokens)
        return np.stack([rows, [kernel_of(num_tokens, i) for i in range(num_tokens)]], axis=1)

    return run


@pytest.mark.parametrize(
    ("few", "minimum"), [(0, 1), (1, 2), (2, 4), (3, 4), (7, 8), (8, 16), (15, 16), (16, None)]
)
def test_the_fewest_rows_with_the_kernel_of_many(few, minimum):
    assert find_min_batch_tokens([rows_with_kernels(lambda n, _: n <= few)]) == minimum


def test_rows_that_differ_by_their_place_are_never_stable():
    assert find_min_batch_tokens([rows_with_kernels(lambda n, place: place % 2)]) is None


def test_all_runs_count():
    same, other = (rows_with_kernels(lambda n, _, k=k: n <= k) for k in (0, 3))
    assert find_min_batch_tokens([same, other]) == 4
    assert find_min_batch_tokens([same, rows_with_kernels(lambda *_: 7)]) is None


@pytest.mark.parametrize(
    ("n_out", "n_threads", "fewer"),
    [(96, 2, 96), (4096, 2, 64), (4100, 2, 68), (4100, 16, 260), (10, 64, 10)],
)
def test_matrices_are_cut_to_what_has_the_same_kernel(n_out, n_threads, fewer):
    assert fewer_outputs(n_out, n_threads) == fewer


# --- models ---------------------------------------------------------------------------------------


def test_a_type_of_cache_is_chosen(models):
    actual = run_of(models("llama"))
    assert actual.exactness.is_exact
    assert {actual.type_k, actual.type_v} <= {"f16", "bf16"}
    assert run_of(models("llama"), "bf16", "bf16").exactness.is_exact
    assert run_of(models("llama"), "q8_0", "q8_0").type_k == "q8_0"


def test_a_cache_that_the_user_names_may_not_be_exact(models, monkeypatch):
    monkeypatch.setattr(exactness._Checks, "attention", lambda self, kind: None)
    actual = run_of(models("llama"), "f16")
    assert actual.exactness == Exactness(
        False,
        "a KV cache of f16 is summed in another order for one row than for many: "
        "leave out --cache-type-k and --cache-type-v",
    )
    assert actual.type_k == "f16"
    actual = run_of(models("llama"))
    assert not actual.exactness.is_exact
    assert "its attention sums" in actual.exactness.reason
    assert actual.type_k == actual.type_v == "f16"  # as if it had not been requested


def test_experts_are_not_filled_up(models):
    """The other rows of a pass set the number per expert; some processors have one kernel."""
    assert run_of(models("mixtral")).exactness.is_exact
    dense, experts = (run_of(models(name, dtype="Q4_K", **LARGE)) for name in ("llama", "mixtral"))
    assert dense.exactness.is_exact
    if not experts.exactness.is_exact:
        assert dense.exactness.min_batch_tokens > 1
        reason = "experts in Q4_K are summed in another order"
        assert experts.exactness.reason.startswith(reason)
    # Passes that send an expert few rows are otherwise equal.
    assert (experts.type_k, experts.type_v) == (dense.type_k, dense.type_v)


FRESH = """
import sys
from pathlib import Path
from backends.contract.source import BackendOptions
from backends.llama.source import GgufSource
for path in sys.argv[1:]:
    print(GgufSource(Path(path), BackendOptions(n_threads=1, is_exact=True)).exactness)
"""


def found_in_a_process(*models):
    paths = [str(model.index.paths[0]) for model in models]
    command = [sys.executable, "-c", FRESH, *paths]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.splitlines()


@pytest.mark.slow
def test_a_mixture_leaves_ggmls_tiles_out(models):
    """Each order needs its own process: ggml asks once per process."""
    dense, experts = (models(name, dtype="Q4_K", hidden=1024) for name in ("llama", "mixtral"))
    alone = found_in_a_process(experts)
    assert alone[0].startswith("Exactness(is_exact=True")
    assert found_in_a_process(experts, dense)[0] == alone[0]
    after = found_in_a_process(dense, experts)
    assert after[0] == found_in_a_process(dense)[0]
    if "min_batch_tokens=8" in after[0]:  # this processor has tiles
        assert after[1].startswith("Exactness(is_exact=False")


def test_experts_that_depend_on_the_batch_leave_the_cache_exact(models, monkeypatch):
    original = exactness._Checks.product

    def of_experts(self, product, record):
        return None if product.has_experts else original(self, product, record)

    monkeypatch.setattr(exactness._Checks, "product", of_experts)
    monkeypatch.setattr(exactness._Checks, "attention", lambda self, kind: _unless_f16(kind))
    run = run_of(models("mixtral", dtype="Q8_0"))
    assert not run.exactness.is_exact
    assert (run.type_k, run.type_v) == ("bf16", "f16")


def _unless_f16(kind):
    return 1 if kind.type_k == exactness._TYPE_IDS["BF16"] else None


@pytest.mark.parametrize(
    ("requested", "types"),
    [
        ((None, None), ("bf16", "bf16")),
        (("f16", None), ("f16", "bf16")),
        ((None, "bf16"), ("f16", "bf16")),
    ],
)
def test_values_are_in_bf16_if_those_in_f16_depend_on_the_pass(
    requested, types, models, monkeypatch
):
    def min_rows(self, kind):
        is_bf16 = kind.type_v == exactness._TYPE_IDS["BF16"]
        return 1 if is_bf16 and (requested != (None, None) or kind.type_k == kind.type_v) else None

    monkeypatch.setattr(exactness._Checks, "attention", min_rows)
    run = run_of(models("llama"), *requested)
    assert run.exactness.is_exact
    assert (run.type_k, run.type_v) == types


def test_here_values_stay_in_f16(models):
    """ggml's kernel for many rows is for keys and values of one type (ops.cpp)."""
    run = run_of(models("llama"))
    assert run.exactness.is_exact
    assert run.type_v == "f16"


@pytest.mark.parametrize(
    ("kernels", "remedy"), [("", "start a fresh process"), ("without tiles", "use a file in Q4_0")]
)
def test_the_remedy_is_another_process_where_tiles_are_in_use(kernels, remedy, models, monkeypatch):
    monkeypatch.setattr(exactness, "kernels_in_use", lambda: kernels)
    monkeypatch.setattr(
        exactness._Checks, "product", lambda _, product, __: None if product.has_experts else 1
    )
    assert remedy in run_of(models("mixtral", dtype="Q4_K", **LARGE)).exactness.reason


def test_products_that_depend_on_other_rows_are_named(models, monkeypatch):
    monkeypatch.setattr(exactness._Checks, "product", lambda self, product, record: None)
    assert run_of(models("llama", dtype="F16")).exactness == Exactness(
        False, "on this machine, products of F16 depend on the other rows of a pass"
    )


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (KvLayer(2, 64, 32), "keys and values of different lengths"),
        (KvLayer(2, 64, 64, 128), "by an index"),
        (KvLayer(1, 576, 0), "compressed keys"),
    ],
)
def test_attention_of_other_kinds(layer, reason, models):
    model = replace(models("llama"), kv_shape=KvShape((layer,)))
    assert reason in run_of(model).exactness.reason


def test_formats_that_are_slow_to_make_come_from_the_file(models, monkeypatch):
    seen = []
    monkeypatch.setattr(
        exactness,
        "product_runs",
        lambda *given: seen.append(given) or batch_invariance.product_runs(*given),
    )
    assert run_of(models("llama", dtype="IQ3_XXS", **LARGE)).exactness.is_exact
    assert any(blocks is not None and blocks.shape == (64, 98) for _, _, blocks in seen)


# --- caching --------------------------------------------------------------------------------------


def test_checks_run_once_for_a_machine(models, monkeypatch, tmp_path):
    model = models("llama")
    actual = run_of(model)
    (file,) = (tmp_path / "cache" / "specdec").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(exactness, "find_min_batch_tokens", lambda runs: pytest.fail("it ran again"))
        assert run_of(model) == actual
    cached = json.loads(file.read_text())
    for damaged in ("", "[1]", json.dumps(dict.fromkeys(cached, 3)), json.dumps({"product": 1})):
        file.write_text(damaged)
        assert run_of(model) == actual
        assert json.loads(file.read_text()).items() >= cached.items()
    find_exact_run(model, 2, None, None)
    assert len(list(file.parent.iterdir())) == 2


# --- source properties ----------------------------------------------------------------------------


def test_a_source_that_is_not_asked_is_as_before(tmp_path):
    path = save_tiny_gguf("llama", tmp_path / "m.gguf")
    plain, asked = (GgufSource(path, BackendOptions(1, is_exact=on)) for on in (False, True))
    assert plain.exactness is EXACT_OFF
    assert asked.exactness.is_exact
    assert plain.fingerprint() != asked.fingerprint()  # results are not shared between the two
    assert plain.smaller_cache_types == asked.smaller_cache_types == ("q8_0", "q4_0")
    for types, smaller in (
        (("bf16", "bf16"), ("q8_0", "q4_0")),
        (("q8_0", "bf16"), ("q8_0", "q4_0")),
        (("q8_0", "q8_0"), ("q4_0",)),
        (("q8_0", "q4_0"), ()),
    ):
        assert GgufSource(path, BackendOptions(1, *types)).smaller_cache_types == smaller
    n_filled = asked.exactness.min_batch_tokens - 1  # maximum number of padding rows
    n_tokens = 256 - n_filled
    assert plain.kv_bytes(n_tokens, 8) == asked.kv_bytes(n_tokens, 8)
    assert plain.with_cache_type("q8_0").kv_bytes(255, 8) < plain.kv_bytes(255, 8)
    if n_filled:  # each padding row needs a cell
        assert 2 * plain.kv_bytes(n_tokens + 1, 8) == asked.kv_bytes(n_tokens + 1, 8)
    assert plain.scratch_bytes(255, 8, 8) < asked.scratch_bytes(256, 8, 8)


def test_capacity_for_padding_rows():
    assert ContextOptions(249, 8, exactness=EIGHT).n_cells == 256
    assert ContextOptions(250, 8, exactness=EIGHT).n_cells == 512
    assert ContextOptions(4, 2, exactness=EIGHT).max_num_tokens == 8
    assert ContextOptions(250, 8, exactness=replace(EIGHT, is_exact=False)).n_cells == 256


def test_few_tokens_take_as_long_as_the_padded_pass():
    curve = ComputeCurve((1, 4, 16), (1.0, 4.0, 16.0), (2.0, 8.0, 32.0))
    filled = curve.padded_to(8)
    assert [filled.seconds(n) for n in (1, 3, 8, 16)] == [8.0, 8.0, 8.0, 16.0]
    assert filled.beside_factor(1) == filled.beside_factor(16) == 2.0
    assert curve.padded_to(1) is curve


def test_attention_that_was_not_checked_is_refused(models, monkeypatch):
    """llama.cpp might decide otherwise in a later version."""
    from backends.llama.backend import LlamaBackend

    monkeypatch.setattr(type(LOG), "lines", lambda self, level=0: ["flash_attn = disabled"])
    with pytest.raises(LlamaError, match="without flash attention"):
        LlamaBackend(models("llama"), max_context=64, load_mode="mmap", exactness=EIGHT)
    source = GgufSource(models("llama").path, BackendOptions(n_threads=1, is_exact=True))
    assert not source.exactness.is_exact
    assert "without flash attention" in source.exactness.reason


def test_cached_results_depend_on_the_number_of_threads_if_exactness_does(models):
    def fingerprints(is_exact):
        return {
            GgufSource(models("llama").path, BackendOptions(n, is_exact=is_exact)).fingerprint()
            for n in (1, 2)
        }

    assert len(fingerprints(is_exact=True)) == 2
    assert len(fingerprints(is_exact=False)) == 1

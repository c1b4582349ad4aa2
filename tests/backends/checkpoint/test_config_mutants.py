"""Any config.json is a model, or ends in one line that says what is wrong with it.

SPECDEC_CONFIG_MUTANTS=5000 tries more of them.
"""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import config_mutants
import pytest
from alone import own
from checkpoints import FAMILIES, MIXTURES, save_tiny_checkpoint

from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource
from backends.shapes.hf import hf_shape
from offload.errors import SpecdecError
from offload.units import GIB

N_MUTANTS = int(os.environ.get("SPECDEC_CONFIG_MUTANTS", "40"))
_MIN_OF_EACH = 4
_CTX = 64


@pytest.fixture(autouse=True)
def address_space() -> Iterator[None]:
    """Limit the address space: a config that asks for absurd memory fails here, not the machine."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (24 * GIB, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def outcome(read: Callable[[Path], object], folder: Path, config: dict[str, Any], what: Any) -> str:
    """Return "ok" or "refused"; fail the test for anything else."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read(folder)
    except SpecdecError as error:
        if "\n" not in str(error):
            return "refused"
        raise AssertionError(f"{what} ended in several lines") from error
    except Exception as error:
        raise AssertionError(f"{what} ended in {type(error).__name__}") from error
    return "ok"


def test_shapes_of_every_family(tmp_path: Path) -> None:
    """Shapes are read from headers without weights, as `specdec analyze` does."""
    rng = random.Random(0)
    outcomes = []
    for number in range(N_MUTANTS):
        family = rng.choice(config_mutants.FAMILIES)
        config, what = config_mutants.mutant(config_mutants.defaults(family), rng)
        outcomes.append(outcome(hf_shape, tmp_path, config, (number, family, what)))
    assert min(map(outcomes.count, ("ok", "refused"))) >= _MIN_OF_EACH


def use(folder: Path) -> None:
    """Load, plan and run a checkpoint."""
    source = HfSource(folder, BackendOptions())
    assert source.scratch_bytes(_CTX, 8, 8) > 0
    assert source.kv_bytes(_CTX, 8) > 0
    assert source.non_layer_bytes + source.head_bytes > 0
    assert source.fingerprint()
    with TorchBackend.resident(folder, max_context=_CTX) as backend:
        own(backend).prefill([3, 17, 5, 60])
        own(backend).extend([5, 6], [-1, -1])


def test_checkpoints_are_loaded_and_run_or_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    families = rng.sample(sorted(FAMILIES | MIXTURES), 4)
    if N_MUTANTS > 1000:
        families = sorted(FAMILIES | MIXTURES)
    folders = {item: save_tiny_checkpoint(item, tmp_path / item) for item in families}
    known = {item: json.loads((f / "config.json").read_text()) for item, f in folders.items()}
    outcomes = []
    for number in range(N_MUTANTS // 2):
        family = rng.choice(families)
        config, what = config_mutants.mutant(known[family], rng)
        outcomes.append(outcome(use, folders[family], config, (number, family, what)))
    assert min(map(outcomes.count, ("ok", "refused"))) >= _MIN_OF_EACH


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3n_text", {}, "set of layer types"),
    ("ctrl", {"n_positions": 10**9}, "asks for tables of"),
    ("gptj", {"n_positions": 10**8}, "asks for tables of"),
    ("codegen", {"n_positions": 10**7}, "asks for tables of|can be built"),
    ("gptj", {"dtype": {"a": 1}}, "TypeError: "),
    ("llama", {"num_hidden_layers": 10**9}, "says 1000000000 layers; without weights"),
    ("gpt2", {"n_layer": 10**9}, "says 1000000000 layers"),
    ("llama", {"vocab_size": 10**12}, "vocab_size is 1000000000000"),
    ("mixtral", {"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
    ("phimoe", {"num_experts_per_tok": 10**9}, "num_experts_per_tok is 1000000000"),
    ("jetmoe", {"num_experts": 2**63}, "num_experts is 9223372036854775808"),
    ("moshi", {"num_codebooks": 10**9}, "num_codebooks is 1000000000"),
    ("llama", {"num_attention_heads": 64, "hidden_size": 32}, "64 .*heads|attention heads"),
    ("llama", {"hidden_act": "x"}, "KeyError|can be built"),
    ("llama", {"layer_types": ["x"]}, "cannot be read|layers|layer_types"),
    ("qwen3", {"rope_parameters": [1]}, "rope_parameters|cannot be read|describes no"),
    ("mistral", {"sliding_window": "x"}, "sliding_window|cannot be read"),
    ("llama", {"architectures": 5, "num_key_value_heads": {"a": 1}}, "num_key_value_heads is"),
]
"""(family, values, expected message): each once ended in a traceback, or took minutes or all
memory, or stands for a kind of value."""


@pytest.mark.parametrize(("family", "values", "said"), WRONG, ids=[str(x[:2])[:60] for x in WRONG])
def test_one_line_says_what_is_wrong(
    tmp_path: Path, family: str, values: dict[str, Any], said: str
) -> None:
    config = {**config_mutants.defaults(family), **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecdecError, match=said) as caught:
        hf_shape(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"output_hidden_states": 0.5, "output_attentions": True},
        {"return_dict": False, "use_cache": False},
        {"attention_dropout": 100.0},
    ],
    ids=str,
)
def test_options_of_calls_and_of_training_change_nothing(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    folder = save_tiny_checkpoint("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert outcome(use, folder, {**config, **values}, values) == "ok"


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("gemma3", {"query_pre_attn_scalar": -256}),
        ("glm4-moe", {"topk_group": 2}),
        ("deepseek-v2", {"topk_method": "x"}),
    ],
)
def test_errors_found_only_by_a_pass_are_reported_by_the_first_one(
    tmp_path: Path, family: str, values: dict[str, Any]
) -> None:
    folder = save_tiny_checkpoint(family, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(SpecdecError, match=r"the first pass of the .* failed .*config\.json"):
        use(folder)


def test_an_error_of_a_later_pass_is_a_bug_and_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_checkpoint("llama", tmp_path / "model")

    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    with TorchBackend.resident(folder, max_context=_CTX) as backend:
        own(backend).prefill([3, 17])
        monkeypatch.setattr("backends.hf.runner.run_model", fail)
        with pytest.raises(RuntimeError, match="ours"):
            own(backend).extend([5], [-1])


def test_a_config_that_is_nested_too_deep(tmp_path: Path) -> None:
    deep = "[" * 900 + "]" * 900
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "x": {deep}}}')
    with pytest.raises(SpecdecError) as caught:
        hf_shape(tmp_path)
    assert "\n" not in str(caught.value)

"""Models are built without weights, in any thread, and leave no trace in torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from checkpoints import FAMILIES
from torch import nn
from transformers import initialization

from backends.checkpoint.skeleton import build_model, decoder_layers
from backends.contract.backend import UnsupportedModel


def tiny_config(family: str = "llama") -> transformers.PreTrainedConfig:
    name, values = FAMILIES[family]
    return getattr(transformers, name)(**values)


@pytest.fixture
def _impatient_threads() -> Iterator[None]:
    """Switch threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_impatient_threads")
def test_models_built_at_once_leave_torch_as_it_was() -> None:
    register, dtype = nn.Module.register_parameter, torch.get_default_dtype()
    start = threading.Barrier(4)

    def build(index: int) -> set[torch.dtype]:
        start.wait()
        model = build_model(tiny_config(), (torch.bfloat16, torch.float16)[index % 2])
        assert all(parameter.is_meta for parameter in model.parameters())
        return {parameter.dtype for parameter in model.parameters()}

    try:
        with ThreadPoolExecutor(4) as threads:
            built = list(threads.map(build, range(4)))
        assert built == [{torch.bfloat16}, {torch.float16}] * 2
        assert nn.Module.register_parameter is register
        assert torch.get_default_dtype() == dtype
    finally:  # restored for the tests after this one
        nn.Module.register_parameter = register
        torch.set_default_dtype(dtype)


def test_a_module_of_another_thread_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    build = transformers.LlamaForCausalLM.__init__

    def build_beside(self: nn.Module, config: transformers.LlamaConfig) -> None:
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        build(self, config)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", build_beside)
    assert all(
        parameter.is_meta for parameter in build_model(tiny_config(), torch.float32).parameters()
    )
    assert not made[0].weight.is_meta


def test_layers_may_stand_below_a_decoder() -> None:
    name, layers = decoder_layers(build_model(tiny_config("opt"), torch.float32))
    assert (name, len(layers)) == ("model.decoder.layers", 3)


def test_an_encoder_is_not_taken_for_a_decoder() -> None:
    """An encoder's tokens attend to the tokens after them."""
    model = build_model(transformers.BertConfig(num_hidden_layers=2), torch.float32)
    with pytest.raises(UnsupportedModel, match="bert is not supported: its 2 layers are not one"):
        decoder_layers(model)


def test_nothing_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialising weights that are then read from the checkpoint took a third of the build."""

    def initialise(*args: object, **options: object) -> None:
        raise AssertionError("a parameter was given values")

    for name in ("normal_", "zeros_", "ones_"):
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, initialise)
    assert build_model(tiny_config(), torch.float32).model.rotary_emb.inv_freq.sum() > 1

"""A failed rollback after a broken pass is repeated before the next pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from alone import own

from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.model import load_hf_model

PROMPT = [3, 17, 5, 60, 41, 8]


def test_a_failed_rollback_is_repeated_before_the_next_pass(
    checkpoint_factory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_hf_model(checkpoint_factory("llama", num_hidden_layers=6))
    with TorchBackend(model, CpuWeights(model, model.layer_weights, 2)) as backend:
        expected = own(backend).prefill(PROMPT)
        own(backend).rollback(0)
        restart, refusals = backend._restart, [OSError("refused"), OSError("refused")]

        def restart_unless_refused() -> None:
            if refusals:
                raise refusals.pop()
            restart()

        def break_off(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("broke off")

        monkeypatch.setattr(backend, "_restart", restart_unless_refused)
        with monkeypatch.context() as inside_a_layer:
            inside_a_layer.setattr(backend._runners[3], "_forward", break_off)
            with pytest.raises(RuntimeError, match="broke off"):
                own(backend).prefill(PROMPT)
        with pytest.raises(OSError, match="refused"):
            own(backend).prefill(PROMPT)
        assert np.array_equal(own(backend).prefill(PROMPT), expected)

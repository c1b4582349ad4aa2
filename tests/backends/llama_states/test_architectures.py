"""Recurrent architectures: which run, and the memory of their states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kinds import close
from plain_rows import Plain
from recurrent_models import TEXT
from tiny_gguf import save_tiny_architecture

from backends.contract.backend import UnsupportedModel
from backends.ggml.library import LlamaModel
from backends.gguf.model import _HYBRID, _RECURRENT, load_gguf_model
from backends.gguf.recurrent import TRIED, refuse_untried
from backends.llama.context import ContextOptions, LlamaContext
from backends.llama.memory import logged_sizes
from backends.llama.recurrent_backend import RecurrentLlamaBackend

pytestmark = pytest.mark.gguf


@pytest.mark.parametrize("name", ["qwen35", "mamba2"])
def test_states_are_planned_as_llama_cpp_allocates_them(name: str, source: Any) -> None:
    opened = source(name)
    for parallel in (1, 4):
        options = ContextOptions(60, 8, max_num_seqs=2 * parallel + 1, is_recurrent=True)
        model = LlamaModel(opened.path, "none")
        context = LlamaContext(model, options)
        n_bytes = logged_sizes(context.log)["RS"]
        context.close()
        model.close()
        planned = opened.state_bytes(parallel, 8)
        assert n_bytes - 2**14 <= planned <= n_bytes + 2**20  # the log has two decimals
        assert opened.scratch_bytes(60, 8, 8) > 0


def test_every_recurrent_architecture_runs_or_says_why(source: Any) -> None:
    model = source("mamba").model
    for name in sorted(_RECURRENT | _HYBRID | {"something-new"}):
        if name in TRIED:
            refuse_untried(replace(model, architecture=name))
            continue
        with pytest.raises(UnsupportedModel, match="does not run: [a-z]") as caught:
            refuse_untried(replace(model, architecture=name))
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_llama_cpp_still_has_other_numbers_for_batches_of_rwkv7(tmp_path: Path) -> None:
    """The reason for its refusal: once this fails, it can be tried again."""
    path = save_tiny_architecture("rwkv7", tmp_path / "m.gguf")
    model = load_gguf_model(path)
    with RecurrentLlamaBackend(model, max_context=60, load_mode="mmap") as backend:
        kv, plain = backend.new_sequence(), Plain(backend)
        whole = kv.prefill(TEXT[:6])
        assert not close(whole, plain.row(TEXT[:6]))

"""Traces of a target on given sequences: the model's, from one pass or from chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forced_streaming import force_streaming
from transformers import AutoModelForCausalLM

from backends.contract.backend import LAST_HIDDEN_STATE
from specdec.run_options import RunOptions
from specdec.traces.reader import Traces
from specdec.training.teacher import Teacher, open_teacher

LENGTHS = (40, 64, 7, 64, 30)
SEQUENCES = [np.random.default_rng(i).integers(3, 250, n).tolist() for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("max_tokens", [1024, 100, 48])
def test_distributions_and_hidden_states_are_the_models(target, tmp_path, max_tokens) -> None:
    run = RunOptions(target, memory_budget="2GiB", threads=1)
    with open_teacher(run, 64, max_tokens) as llm:
        Teacher(llm, "name", (LAST_HIDDEN_STATE,)).record(SEQUENCES, tmp_path)
    traces = Traces(tmp_path)
    assert len(traces) == len(SEQUENCES)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for number, ids in enumerate(SEQUENCES):
        assert traces.token_ids(number).tolist() == ids
        assert traces.rows(number).tolist() == list(range(len(ids)))
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_hidden_states=True)
        expected = output.logits[0].log_softmax(-1)
        top = traces.top(number)
        values = expected.gather(1, torch.from_numpy(top.ids).long())
        np.testing.assert_allclose(top.logprobs, values, atol=0.02)
        assert torch.allclose(values[:, 0], expected.max(-1).values, atol=1e-4)
        path, part = traces.location(number)
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            states = file.get_slice("hidden_states")[part].float()
        torch.testing.assert_close(states, output.hidden_states[-1][0], atol=0.03, rtol=0.01)


def test_a_target_that_streams_is_read_once_for_many_tokens(tmp_path, monkeypatch) -> None:
    force_streaming(monkeypatch)
    run = RunOptions("pair:target", memory_budget="2GiB", threads=1)
    ids = [np.random.default_rng(i).integers(3, 4000, 64).tolist() for i in range(8)]
    with open_teacher(run, 64) as llm:
        assert llm.plan.placement.n_streamed_layers > 0
        Teacher(llm, "name").record(ids[:1], tmp_path / "one")
        of_one = llm.target.transfer_stats.bytes_streamed
        Teacher(llm, "name").record(ids, tmp_path / "eight")
        of_eight = llm.target.transfer_stats.bytes_streamed - of_one
    assert of_eight < 1.5 * of_one
    expected, actual = Traces(tmp_path / "one"), Traces(tmp_path / "eight")
    agreeing = expected.top(0).ids[:, 0] == actual.top(0).ids[:, 0]
    assert agreeing.mean() > 0.9  # in bf16, in passes of another size

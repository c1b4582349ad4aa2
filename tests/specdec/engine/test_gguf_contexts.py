"""A GGUF model's context that does not fit in the budget: llama.cpp allocates all of its KV, so
every way to open it refuses in one line, with a context and a budget that would do."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from command_line import expect_error
from gguf_models import save_tiny_gguf

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import specdec
from offload.budget import BudgetExceeded
from offload.units import MIB, format_bytes

pytestmark = pytest.mark.gguf
CTX = 262144
KV_BYTES = 2 * 3 * 2 * 32 * 2 * CTX
"""Keys and values of 3 layers with 2 heads of 32 numbers in 2 bytes: 192 MiB."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "long.gguf"
    return save_tiny_gguf("llama", path, n_ctx=CTX)


@pytest.fixture
def budget(model: Path) -> int:
    """A budget in MiB in which a third of the context's KV does not fit."""
    smallest = specdec.plan_run(model, spec_type="none", ctx_size=CTX).smallest_budget_bytes
    return (smallest - KV_BYTES // 3) // MIB


def words(budget: int) -> tuple[str, ...]:
    has = f"but the memory budget has {format_bytes(budget * MIB)}; the smallest budget that works"
    return "this run needs ", has, f"; with --ctx-size {CTX // 2} it is "


@pytest.mark.parametrize("command", ["run", "batch", "plan", "chat"])
def test_commands(
    command: str, model: Path, budget: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    more = {"run": ["-p", "a"], "batch": [str(prompts), "-o", str(tmp_path / "out")]}.get(
        command, []
    )
    argv = [command, *more, "-m", str(model), "--spec-type", "none", "-c", str(CTX)]
    expect_error(capsys, [*argv, "--memory-budget", f"{budget}MiB"], *words(budget))


def test_python_and_the_context_that_it_names(model: Path, budget: int) -> None:
    options = {"spec_type": "none", "memory_budget": budget * MIB}
    with pytest.raises(BudgetExceeded) as caught:
        specdec.load(model, ctx_size=CTX, **options)
    assert "\n" not in str(caught.value)
    named = re.search(r"with ctx_size=(\d+) it is (\d+) MiB", str(caught.value))
    assert named is not None
    assert int(named[2]) <= budget
    with specdec.load(model, ctx_size=int(named[1]), **options) as llm:
        assert llm.generate([5, 6, 7], max_tokens=3, ignore_eos=True).token_ids


def test_a_server(model: Path) -> None:
    pytest.importorskip("fastapi")
    from serving import Server

    # A smaller budget: the server's processes have less beside the model than this one.
    argv = ("--spec-type", "none", "-c", str(CTX), "--parallel", "1", "--memory-budget", "400MiB")
    with Server(model, *argv) as server:
        assert server.process.wait(120) == 2, server.lines
        end = time.monotonic() + 10
        while not any("error: this run needs" in line for line in server.lines):
            assert time.monotonic() < end, server.lines
            time.sleep(0.01)
        assert re.search(r"; with --ctx-size \d+ it is \d+ MiB", server.lines[-1]), server.lines

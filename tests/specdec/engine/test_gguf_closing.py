"""A GGUF model closed in a signal handler, inside its own generation.

In a process of its own: what would go wrong is a crash in llama.cpp.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_models import save_tiny_gguf

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
pytestmark = pytest.mark.gguf

ROOT = Path(__file__).parents[3]
CHILD = """
import faulthandler, os, signal, sys
import pytest
import specdec
from forced_streaming import force_streaming
from specdec.api import ModelClosed

faulthandler.enable()
model, then = sys.argv[1:]
with pytest.MonkeyPatch.context() as patch:
    force_streaming(patch)
    llm = specdec.load(model, ctx_size=256, spec_type="none", threads=1)
assert llm.plan.placement.n_streamed_layers > 0
passes, held = [], []
decode = llm.target._decode

def close(*_):
    llm.close()
    held.append(llm.target.kv_bytes)
    if then == "leave":
        raise SystemExit(7)

def interrupted(batch):  # in the engine's thread, while the main one waits
    passes.append(1)
    if len(passes) == 3:
        os.kill(os.getpid(), signal.SIGALRM)
    return decode(batch)

signal.signal(signal.SIGALRM, close)
llm.target._decode = interrupted
try:
    llm.generate([5, 6, 7], max_tokens=100, ignore_eos=True)
except (ModelClosed, SystemExit) as error:
    assert held == [0], "the handler waits for the pass"
    print(type(error).__name__, len(passes) < 100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("then", "output"), [("go on", "ModelClosed"), ("leave", "SystemExit")])
def test_closing_in_a_signal_handler(tmp_path: Path, then: str, output: str) -> None:
    model = save_tiny_gguf("llama", tmp_path / "m.gguf")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(model), then],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [output, "True"]

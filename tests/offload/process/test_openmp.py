"""OpenMP's threads spin for a bounded time, unless the user sets another one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from offload.process.openmp import LLAMA_SPINS, TORCH_SPINS, bounded_spinning


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_loaded_inside_reads_the_number_and_later_programs_do_not() -> None:
    with bounded_spinning(123):
        assert os.environ["GOMP_SPINCOUNT"] == "123"
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "7")]
)
def test_the_users_own_setting_stands(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with bounded_spinning(123):
        assert dict(os.environ) == before
    assert dict(os.environ) == before


LOADS = {
    "torch": ("import backends.hf.source", TORCH_SPINS),
    "torch, a vocabulary first": (
        "from specdec.models.opened import read_vocabulary; read_vocabulary('pair:draft')",
        TORCH_SPINS,
    ),
    "torch, a shape first": (
        "from specdec.analysis.analyze import analyze; analyze('pair:draft')",
        TORCH_SPINS,
    ),
    "llama": ("from backends.ggml.library import load_library; load_library()", LLAMA_SPINS),
    "ggml": ("from backends.ggml.operators import load_ggml; load_ggml()", LLAMA_SPINS),
}


@pytest.mark.slow
@pytest.mark.parametrize("library", LOADS)
def test_each_librarys_libgomp_was_loaded_with_its_number(library: str) -> None:
    """libgomp reports the number itself at its start."""
    if not library.startswith("torch"):
        pytest.importorskip("llama_cpp")
    code, n_spins = LOADS[library]
    environment = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    messages = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not messages:
        pytest.skip("the OpenMP that this library came with is not libgomp")
    assert messages[0].split("=")[1].strip() == f"'{n_spins}'"

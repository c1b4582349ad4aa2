"""The demo plans before it writes: a target too small is refused with the smallest size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import demo
from bench.commands.app import main
from bench.synth.stand_in import StandIn, StandInError, smallest_budget
from offload.units import MIB

pytestmark = pytest.mark.usefixtures("forked_children")

STAND_IN = StandIn("pair:target", "gguf", "q8_0", 1_000_000_000, 4096, "pair:draft.gguf", 512)


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> str:
    assert main(["demo", "--dir", str(folder / "new"), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *announced, error = err.splitlines(keepends=True)
    assert all(line.startswith("demo: ") for line in announced), err
    assert list(folder.iterdir()) == []
    return error


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 MB and a tenth of the target; below 600 MB there is no such model."""

    def budget(stand_in: StandIn) -> int | None:
        n_bytes = stand_in.n_bytes
        return None if n_bytes < 600_000_000 else 300_000_000 + n_bytes // 10 - demo._MARGIN_BYTES

    monkeypatch.setattr(demo, "smallest_budget", budget)


@pytest.mark.parametrize("size", ["300MB", "600MB", "0.8GB"])
def test_the_least_size_is_named_and_works(
    needs: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    error = refusal(capsys, tmp_path, "--size", size)
    actual = re.search(r"give --size ([0-9.]+GB) or more", error)
    assert actual is not None, error
    assert actual[1] == "0.9GB"  # 390 MB are less than 45 % of it, and of no smaller one
    monkeypatch.setattr(demo, "run_child", write_now)
    with pytest.raises(RuntimeError, match="it would write now"):
        demo.run_demo(size=actual[1], directory=tmp_path)


def write_now(*_: object) -> int:
    raise RuntimeError("it would write now")


def test_a_budget_that_is_too_small_for_the_size(
    needs: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, tmp_path, "--size", "2GB", "--memory-budget", "400MB")
    assert "give --memory-budget 477MiB" in error
    error = refusal(capsys, tmp_path, "--size", "0.7GB", "--memory-budget", "300MB")
    assert "give --size 0.9GB or more" in error


@pytest.mark.slow
@pytest.mark.gguf
def test_a_stand_in_is_planned_for() -> None:
    small = smallest_budget(STAND_IN)
    large = smallest_budget(replace(STAND_IN, n_bytes=40_000_000_000))
    assert small is not None
    assert large is not None
    assert 200 * MIB < small < large < 8_000_000_000


@pytest.mark.slow  # imports torch
def test_a_checkpoint_s_stand_in_is_planned_for() -> None:
    pytest.importorskip("torch")
    needed = smallest_budget(replace(STAND_IN, format="hf", dtype="bf16", draft="pair:draft"))
    assert needed is not None
    assert 200 * MIB < needed < 1_287 * MIB  # the demo's own memory


@pytest.mark.slow
@pytest.mark.gguf
def test_what_cannot_be_planned_for() -> None:
    assert smallest_budget(replace(STAND_IN, n_bytes=1000)) is None
    with pytest.raises(StandInError, match="no such model directory: /no/draft"):
        smallest_budget(replace(STAND_IN, draft="/no/draft"))

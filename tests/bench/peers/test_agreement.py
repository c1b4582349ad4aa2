"""Agreement of the ratios of two `specdec-bench peers` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_values import comparison, peer_row

from bench.commands.app import main
from bench.peers.agreement import agreements


def prompt(name: str, seconds: float, n_tokens: int = 5) -> dict[str, Any]:
    arrivals = [[1.0 + seconds * i, 1] for i in range(n_tokens + 1)]
    return {"prompt": name, "category": "", "arrivals": arrivals, "bytes_read": None}


def run(**programs: dict[str, float]) -> dict[str, Any]:
    """program -> prompt -> seconds per token."""
    rows = [
        peer_row(name, 1.0, prompts=[prompt(text, s) for text, s in seconds.items()])
        for name, seconds in programs.items()
    ]
    return {**comparison(), "peers": rows}


def test_programs_are_taken_over_the_prompts_of_both_runs() -> None:
    """The second run's slow program reached a prompt that is quick for the other one."""
    first = run(slow={"a": 1.0}, quick={"a": 0.5, "b": 0.1})
    again = run(slow={"a": 1.1, "b": 1.1}, quick={"a": 0.5, "b": 0.1})
    (actual,) = agreements(first, again)
    assert (actual.name, actual.other, actual.n_prompts) == ("quick", "slow", 1)
    assert actual.first == pytest.approx(2.0)
    assert actual.again == pytest.approx(2.2)
    assert actual.difference == pytest.approx(0.1)


def test_pairs_are_taken_over_the_tokens_of_both_runs() -> None:
    """In the second run the slow program got further, to where the quick one is quicker."""
    quick = prompt("a", 0.5, 2)
    quick["arrivals"] += [[2.1, 1], [2.2, 1]]
    first, again = (
        {**comparison(), "peers": [
            peer_row("slow", 1.0, prompts=[prompt("a", 1.0, n_tokens)]),
            peer_row("quick", 1.0, prompts=[quick]),
        ]}
        for n_tokens in (2, 4)
    )  # fmt: skip
    (actual,) = agreements(first, again)
    assert (actual.first, actual.again, actual.n_tokens) == (2.0, 2.0, 2)


def test_a_program_of_one_run_is_left_out() -> None:
    first = run(slow={"a": 1.0}, quick={"a": 0.5})
    again = run(other={"a": 1.0}, quick={"a": 0.5})
    assert list(agreements(first, again)) == []


@given(
    st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3),
    st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3),
)
def test_it_matters_not_which_run_is_the_first(item: list[float], other: list[float]) -> None:
    names = ("x", "y", "z")
    runs = [run(**{n: {"a": s} for n, s in zip(names, v, strict=True)}) for v in (item, other)]
    there, back = list(agreements(*runs)), list(agreements(*reversed(runs)))
    assert len(there) == 3
    for forth, again in zip(there, back, strict=True):
        assert forth.difference == pytest.approx(again.difference)
        assert forth.difference >= 0.0


@pytest.mark.parametrize(("within", "code"), [("15", 0), ("5", 1)])
def test_the_command(
    within: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for path, seconds in zip(files, (1.0, 1.1), strict=True):
        path.write_text(json.dumps(run(slow={"a": seconds}, quick={"a": 0.5})))
    page = tmp_path / "page.html"
    assert main(["report", *map(str, files), "--within", within, "-o", str(page)]) == code
    assert "largest difference 10.0%: quick / slow" in capsys.readouterr().out
    assert "Agreement of two runs" in page.read_text()


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(comparison()))  # from a version without saved prompts
    page = str(tmp_path / "page.html")
    for files in ([bare, bare], [bare]):
        assert main(["report", *map(str, files), "--within", "15", "-o", page]) == 2
        assert "programs in common: give both" in capsys.readouterr().err

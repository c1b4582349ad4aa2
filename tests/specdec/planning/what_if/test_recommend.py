"""Recommended pairs: those that fit, with the planner's own predictions."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import expect_error

import specdec
from offload.units import GIB, MIB
from specdec.cli.app import main
from specdec.models.names import is_hub_id
from specdec.planning.what_if import recommend as advice
from specdec.planning.what_if.known_models import PAIRS, REPOSITORIES, SIZES, KnownPair, model_id
from specdec.planning.what_if.recommend import recommend

README = Path(specdec.__file__).resolve().parent.parent / "README.md"
SMALL = (KnownPair("Qwen3-4B", "Q4_K_M", "Qwen3-0.6B"),)
LARGE = (KnownPair("Llama-3.3-70B", "Q4_K_M", "Llama-3.2-1B"),)


@pytest.fixture(autouse=True)
def _two_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(advice, "PAIRS", SMALL + LARGE)


def test_what_fits_is_in_memory_and_what_does_not_streams() -> None:
    small, large = recommend(12 * GIB)
    assert (small.target, small.draft, small.streamed_bytes) == ("Qwen3-4B", None, 0)
    assert (large.target, large.draft) == ("Llama-3.3-70B", "Llama-3.2-1B")
    assert 28 * GIB < large.streamed_bytes < 40 * GIB
    assert large.tokens_per_second < 1 < small.tokens_per_second
    assert large.smallest_bytes < 12 * GIB


def test_a_faster_laptop_is_faster_and_little_memory_fits_nothing() -> None:
    slow, fast = recommend(12 * GIB)[1], recommend(12 * GIB, "laptop-ddr5")[1]
    ratio = fast.tokens_per_second / slow.tokens_per_second
    assert ratio == pytest.approx(6.5 / 3.0, rel=0.1)  # the storage's
    assert recommend(GIB // 2) == []


def test_where_nothing_fits_one_line_says_what_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "PAIRS", SMALL)
    expect_error(capsys, ["recommend", "--memory-budget", "100MB"], "no listed model fits")
    needed = "Qwen3-4B in Q4_K_M needs "
    assert main(["recommend", "--memory-budget", "600MiB", "--json"]) == 2
    error = capsys.readouterr().err
    smallest = error.partition(needed)[2].partition(" MiB;")[0]
    assert [item.target for item in recommend(int(smallest) * MIB + 64 * MIB)] == ["Qwen3-4B"]


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(KnownPair("Llama-3.1-8B", "Q4_K_M", "Llama-3.2-1B"), id="dense"),
        pytest.param(
            KnownPair("Qwen3-30B-A3B", "Q4_K_M", "Qwen3-0.6B"), id="mixture", marks=pytest.mark.slow
        ),
    ],
)
def test_more_memory_is_never_slower(pair: KnownPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory a draft is loaded, as it costs nothing there, but used only where it pays."""
    monkeypatch.setattr(advice, "PAIRS", (pair,))
    speeds = [recommend(n * GIB)[0].tokens_per_second for n in (3, 5, 6, 8, 12, 24)]
    for before, after in pairwise(speeds):
        assert after >= 0.95 * before, speeds  # capacity for larger trees may cost 5 %


def test_a_draft_that_does_not_pay_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is its download. In memory a Q4_K_M of this size is bound by arithmetic."""
    monkeypatch.setattr(advice, "PAIRS", (KnownPair("Llama-3.1-8B", "Q4_K_M", "Llama-3.2-1B"),))
    (item,) = recommend(24 * GIB)
    assert (item.draft, item.draft_id, item.streamed_bytes) == (None, None, 0)
    assert item.download_bytes < 5.0e9


def test_names_are_those_that_m_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REPOSITORIES.keys() == SIZES.keys()
    assert all(is_hub_id(model_id(pair.target, pair.file_type)) for pair in PAIRS)
    assert main(["recommend", "--memory-budget", "12GiB"]) == 0
    text = capsys.readouterr().out
    assert "\n  Llama-3.3-70B  bartowski/Llama-3.3-70B-Instruct-GGUF\n" in text
    assert text.endswith("\nthe fastest of them: specdec run -m Qwen/Qwen3-4B-GGUF:Q4_K_M\n")
    monkeypatch.setattr(advice, "PAIRS", LARGE)
    assert main(["recommend", "--memory-budget", "12GiB"]) == 0
    assert capsys.readouterr().out.endswith(
        "\nthe fastest of them: specdec run -m bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M "
        "-md bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0\n"
    )


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--memory-budget", "12GiB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("run within 12.00 GiB, the rest read from storage in every pass; ")
    assert "predicted for laptop, not measured" in text
    assert "Llama-3.3-70B" in text
    assert main(["recommend", "--memory-budget", "12GB", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["memory_bytes"] == 12 * 10**9
    assert [item["target"] for item in value["recommendations"]] == ["Qwen3-4B", "Llama-3.3-70B"]
    assert main(["recommend", "--memory-budget", "lots"]) == 2
    assert main(["recommend", "--on", "abacus"]) == 2
    capsys.readouterr()
    expect_error(capsys, ["recommend", "--markdown", "--json"], "give one of them")


def test_the_table_has_a_row_for_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "TABLE_GIB", (8, 64))
    head, _, *rows = advice.markdown_table().splitlines()
    assert head.endswith("| 8 GB | 64 GB |")
    assert [row.split(" | ")[0] for row in rows] == [
        "| Qwen3-4B, Q4_K_M",
        "| Llama-3.3-70B, Q4_K_M",
    ]


def table_cells(text: str) -> dict[str, dict[str, str]]:
    """Return the table of pairs in a text: model -> heading -> cell."""
    table = text[text.index("| model | draft, Q8_0") :].partition("\n\n")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


@pytest.mark.parametrize(
    ("targets", "sizes"),
    [
        pytest.param({"Qwen3-14B"}, (8,), id="one"),
        pytest.param({p.target for p in PAIRS}, advice.TABLE_GIB, id="all", marks=pytest.mark.slow),
    ],
)
def test_the_table_of_the_readme_is_what_is_printed(
    targets: set[str], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "PAIRS", tuple(p for p in PAIRS if p.target in targets))
    monkeypatch.setattr(advice, "TABLE_GIB", sizes)
    printed = table_cells(advice.markdown_table())
    readme = table_cells(README.read_text(encoding="utf-8"))
    assert len(printed) == len(targets)
    for model, cells in printed.items():
        assert cells == {heading: readme[model][heading] for heading in cells}
    if len(targets) > 1:
        assert readme.keys() == printed.keys()


def test_a_model_without_a_draft_drafts_from_n_grams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "PAIRS", (KnownPair("gpt-oss-20b", "MXFP4", None),))
    (item,) = recommend(12 * GIB)
    assert (item.draft, item.streamed_bytes) == (None, 0)
    (row,) = advice.markdown_table().splitlines()[2:]
    assert row.startswith("| gpt-oss-20b, MXFP4 | n-grams | 12.1 GB |")
    assert advice.STAR not in row


def test_drafts_have_the_vocabulary_of_their_targets() -> None:
    for pair in PAIRS:
        if pair.draft is not None:
            assert SIZES[pair.draft].vocab_size == SIZES[pair.target].vocab_size

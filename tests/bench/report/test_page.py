"""The report page for every kind of results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from result_values import (
    PICTURE,
    comparison,
    curve,
    peer_row,
    policy,
    predicted_line,
    speedup,
    sweep_line,
)

from bench.commands.app import main
from bench.process.results import read_all, read_results
from bench.report.data import Depths, Point, bars, curves, depths, points
from bench.report.plots import acceptance_by_depth
from bench.report.tables import tables
from offload.units import GIB

pytest.importorskip("matplotlib")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    values = {
        "peers": comparison(), "speedup": speedup(), "curve": curve(), "policy": policy(),
        "prediction": predicted_line(),
    }  # fmt: skip
    actual = {}
    for kind, value in values.items():
        actual[kind] = tmp_path / f"{kind}.json"
        actual[kind].write_text(json.dumps(value))
    actual["picture"] = tmp_path / "run.png"
    actual["picture"].write_bytes(PICTURE)
    lines = [
        sweep_line(
            budget, mbps, tree, None if budget == 3 * GIB and tree == 0 else 1.0 + budget / GIB
        )
        for budget in (GIB, 2 * GIB, 3 * GIB)
        for mbps in (90.0, None)
        for tree in (0, None)
    ]
    actual["sweep"] = tmp_path / "sweep.jsonl"
    actual["sweep"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return actual


@pytest.mark.slow_except(2)
@pytest.mark.parametrize(
    ("kind", "pictures", "words"),
    [
        (
            "peers",
            ["speed-peers", "acceptance"],
            ["37.20 (2 prompts, 14 tokens)", "&lt;airllm&gt;", "writing"],
        ),
        (
            "speedup",
            ["speed-speedup", "budgets-grown", "acceptance"],
            ["10.00x over plain", "3 of 4"],
        ),
        ("sweep", ["budgets-sweep", "acceptance"], ["tree: auto", "oom-killed"]),
        ("curve", ["curve-curve"], ["0.50: 2 (2.40x)", "2.10 ± 0.10", "decoding&#x27;s: 6 of 6"]),
        ("policy", ["speed-policy"], ["auto is 0.950 x the best", "LOSSY (--accept-threshold)"]),
        (
            "prediction",
            ["budgets-prediction", "acceptance"],
            ["Largest error 5.0%", "-4.0%", "1.250"],
        ),
        ("picture", ["timeline-run"], []),
    ],
)
def test_a_page_from_each_kind(
    files: dict[str, Path], tmp_path: Path, kind: str, pictures: list[str], words: list[str]
) -> None:
    page = tmp_path / "out" / "page.html"
    page.parent.mkdir()
    assert main(["report", str(files[kind]), "-o", str(page)]) == 0
    assert {path.name for path in page.parent.iterdir()} == {
        "page.html",
        *(f"page-{name}.png" for name in pictures),
    }
    text = page.read_text()
    assert text.count("data:image/png;base64,") == len(pictures)
    for word in words:
        assert word in text
    # Self-contained, and no text of a file becomes a tag.
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "<x>" not in text
    for name in pictures:
        assert (page.parent / f"page-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_bars_over_other_outputs_say_over_which(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    rows = [peer_row("accelerate", 0.5, n_tokens=9), peer_row("specdec", 1.0)]
    path.write_text(json.dumps({**comparison(), "peers": rows}))
    notes = [bar.note for bar in bars(read_results(path))]
    assert notes == ["2 prompts, 9 tokens", "2 prompts, 20 tokens"]


def test_output_that_is_not_the_targets_own_is_reported(tmp_path: Path) -> None:
    item = speedup()
    item["speculative"]["is_lossless"] = False
    (tmp_path / "speedup.json").write_text(json.dumps(item))
    line = {**sweep_line(GIB, None, 16, 1.0), "is_lossless": False}
    (tmp_path / "sweep.jsonl").write_text(json.dumps(line))
    for name, n_bars in (("speedup.json", 1), ("sweep.jsonl", 0)):
        results = read_results(tmp_path / name)
        assert sum("LOSSY" in bar.note for bar in bars(results)) == n_bars
        assert ["LOSSY" in point.series for point in points([results])].count(True) == 1
        [table] = tables(results.kind, results.value)
        assert ["LOSSY" in " ".join(row) for row in table.rows].count(True) == 1


def test_all_kinds_on_one_page(files: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", *map(str, files.values()), "-o", str(page)]) == 0
    assert page.read_text().count("<details>") == 6  # a picture without provenance


def test_files_of_one_name_are_all_on_the_page(files: dict[str, Path], tmp_path: Path) -> None:
    page, both = tmp_path / "page.html", []
    for kind in ("peers", "sweep"):
        other = tmp_path / "again" / files[kind].name
        other.parent.mkdir(exist_ok=True)
        other.write_text(files[kind].read_text())
        both += [files[kind], other]
    assert main(["report", *map(str, both), "-o", str(page)]) == 0
    names = ["speed-peers", "speed-peers-2", "budgets-sweep", "budgets-sweep-2", "acceptance"]
    drawn = {f"page-{name}.png" for name in names}
    assert {path.name for path in tmp_path.glob("*.png")} - {"run.png"} == drawn
    assert page.read_text().count("data:image/png;base64,") == len(names)
    shares = [depth.name.partition(":")[0] for depth in depths(read_all(both))]
    assert shares == ["peers", "peers-2", "sweep", "sweep-2"]


def test_the_roofline_of_a_point() -> None:
    point = Point("plain", None, GIB, 1.5, 10**9, 2e9, 1.0)
    assert point.roofline == pytest.approx(2.0)
    assert Point("tree", None, GIB, 1.5, 10**9, 2e9, 3.0).roofline == pytest.approx(6.0)
    assert Point("plain", None, GIB, 9.0, 0, 2e9, 1.0).roofline is None


def test_what_is_drawn_of_each_kind(files: dict[str, Path]) -> None:
    results = {kind: read_results(path) for kind, path in files.items()}
    assert [bar.tokens_per_second for bar in bars(results["peers"])] == [0.25, None, None, 9.3]
    assert bars(results["peers"])[1].note == "not-run: not installed: <airllm>"
    actual = points(results.values())
    assert len(actual) == (12 - 2) + 2 + 1  # no point without a speed
    slowed = [point for point in actual if point.storage_mbps == 90.0]
    assert {point.storage_bytes_per_second for point in slowed} == {90e6}
    sums = {depth.name: (depth.tried, depth.accepted) for depth in depths(results.values())}
    assert sums["peers: specdec"] == ((9, 6), (6, 3))
    assert sums["sweep: tree: auto"] == ((36,), (30,))
    assert sums["speedup: specdec"] == ((10, 8), (8, 4))  # two steps at depth 3 are too few
    assert [depth.name for depth in depths([results["peers"]])] == ["specdec"]


def test_files_have_lines_of_their_own(files: dict[str, Path]) -> None:
    """Drafts may differ between files, so one line through both would be meaningless."""
    both = [read_results(files[kind]) for kind in ("speedup", "prediction")]
    assert {point.series for point in points(both[:1])} == {"plain", "speculative"}
    assert {point.series for point in points(both)} == {
        "plain: speedup", "speculative: speedup", "tree: 16 tokens: prediction"
    }  # fmt: skip


def test_more_lines_than_colours_are_distinguished() -> None:
    several = [Depths(f"a rather long name of a file, {n}", (9, 9), (8, 7)) for n in range(15)]
    figure = acceptance_by_depth(several, "")
    reach, each = figure.axes
    for axes in (reach, each):
        looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
        assert len(looks) == len(several)
    [legend] = figure.legends
    figure.draw_without_rendering()
    assert legend.get_window_extent().width <= figure.bbox.width


def test_missing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["report", str(tmp_path / "none.json"), "-o", str(tmp_path / "r.html")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_curves_lines_and_points(files: dict[str, Path]) -> None:
    actual = curves(read_results(files["curve"]))
    assert [item.n_draft_tokens for item in actual] == [2, 8]
    rates, speedups, errors = zip(*actual[0].measured, strict=True)
    assert rates == (0.5, 0.9)
    assert speedups == pytest.approx((2.4, 2.8))
    assert errors == pytest.approx((2.4 * 0.1 / 2.1, 2.8 * 0.1 / 2.1))
    assert actual[0].relative_pass_seconds == pytest.approx((2.0 * 2.8) ** 0.5)
    assert actual[0].predicted(0.5) == pytest.approx((1 + 0.5 + 0.25) / (2.0 * 2.8) ** 0.5)
    assert curves(read_results(files["speedup"])) == []


def test_points_without_a_pass_are_not_drawn(tmp_path: Path) -> None:
    value = curve()
    for point in value["points"]:
        if point["n_draft_tokens"] == 8:
            point |= {"pass_seconds": None, "efficiency": None, "speedup": 0.0}
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(value))
    assert [item.n_draft_tokens for item in curves(read_results(path))] == [2]


@pytest.mark.parametrize("kind", ["peers", "speedup", "sweep", "curve", "policy"])
def test_damaged_results_are_named_and_nothing_is_written(
    files: dict[str, Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page, damaged = tmp_path / "page.html", tmp_path / f"damaged-{kind}.json"
    page.write_text("mine")
    value = read_results(files[kind]).value
    value = value["settings"][0] if kind == "sweep" else value
    damaged.write_text(json.dumps(_without_values(value)))
    assert main(["report", str(damaged), "-o", str(page)]) == 2
    error = capsys.readouterr().err
    assert f"{damaged} is damaged, or of another version" in error
    assert error.count("\n") == 1
    assert page.read_text() == "mine"
    assert len(list(tmp_path.glob("*.png*"))) <= 1


def _without_values(value: dict[str, Any]) -> dict[str, Any]:
    """Only the keys that identify the kind of results, without useful values."""
    return {key: [{}] if isinstance(item, list) else {} for key, item in value.items()}


def test_results_are_not_written_over(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files["peers"].read_bytes()
    assert main(["report", str(files["peers"]), "-o", str(files["peers"])]) == 2
    assert "is one of the results: name another page with -o" in capsys.readouterr().err
    assert files["peers"].read_bytes() == before

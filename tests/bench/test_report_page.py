"""The report's page, from every kind of results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.aggregate import aggregate_stats
from bench.cli import main
from bench.report_data import Point, bars, curves, depths, points
from bench.report_tables import tables
from bench.results import ResultsError, read_all, read_results, write_json
from offload.units import GIB
from specdec.stats import GenerationStats

pytest.importorskip("matplotlib")

PROVENANCE = {"git_revision": "abc", "argv": ["specdec-bench", "<x>"], "date": "today"}


def stats(seconds: float, passes: int) -> dict[str, Any]:
    one = GenerationStats(
        generated_tokens=41,
        passes=passes,
        accepted_tokens=40 - passes,
        decode_seconds=seconds,
        tried_by_depth=(10, 8, 2),
        accepted_by_depth=(8, 4, 0),
    )
    return aggregate_stats([{"stats": one.to_dict()}])


def peer_row(name: str, speed: float | None, **more: Any) -> dict[str, Any]:
    return {
        "peer": name, "weights": "hf", "exit": "ok", "reason": None, "tokens_per_second": speed,
        "time_to_first_token": speed, "seconds_per_token_median": speed,
        "seconds_per_token_p90": speed, "bytes_read_per_token": None,
        "mean_acceptance_length": None, "peak_anonymous_bytes": GIB, "cgroup_peak_bytes": None,
        "n_prompts": 2, "n_tokens": 20, "by_category": {}, "acceptance_by_depth": None, **more,
    }  # fmt: skip


def comparison() -> dict[str, Any]:
    depth = [{"tried": 9, "accepted": 6}, {"tried": 6, "accepted": 3}]
    figures = {"tokens_per_second": 1.0, "mean_acceptance_length": 2.0}
    return {
        "peers": [
            peer_row("accelerate", 0.25),
            peer_row("airllm", None, exit="not-run", reason="not installed: <airllm>"),
            peer_row("llama.cpp", None, exit="oom-killed", reason="killed", n_prompts=0),
            peer_row("specdec", 9.3, mean_acceptance_length=11.9, acceptance_by_depth=depth,
                     by_category={"writing": figures}),
        ],
        "ratios": {"specdec": {"accelerate": {"ratio": 37.2, "n_prompts": 2, "n_tokens": 14}},
                   "accelerate": {"specdec": {"ratio": 0.0269, "n_prompts": 2}}},
        "weights": [{"model": "/m/grown-6gb", "draft": None, "n_bytes": GIB, "types": {}}],
        "memory_budget_bytes": GIB, "enforced": True, "storage_mbps": 500.0,
        "n_prompts": 2, "max_tokens": 10, "provenance": PROVENANCE,
    }  # fmt: skip


def speedup() -> dict[str, Any]:
    return {
        "plain": stats(40.0, 40), "speculative": stats(4.0, 10), "speedup": 10.0,
        "records": [], "peer": None, "model": "/m/grown", "memory_budget_bytes": 2 * GIB,
        "bytes_per_pass": 10**9, "storage_bytes_per_second": 2e9, "prompts_equal": 3,
        "n_prompts": 4, "provenance": PROVENANCE,
    }  # fmt: skip


def budgets() -> dict[str, Any]:
    row = {
        "memory_budget": "1.5GiB", "killed": False, "streamed_bytes_per_pass": 2 * 10**9,
        "tokens_per_second": 3.0, "mean_acceptance_length": 4.0, "peak_memory_bytes": GIB,
        "n_equal_texts": 2, "n_texts": 2,
    }  # fmt: skip
    return {
        "budgets": [{"memory_budget": "1GiB", "killed": True}, row],
        "records": {"1.5GiB": [{"storage_bytes_per_second": 2e9}]},
        "provenance": {**PROVENANCE, "argv": ["budgets", "-m", "/m/grown"]},
    }


def sweep_line(budget: int, mbps: float | None, tree: int | None, speed: float | None) -> Any:
    return {
        "setting": {"memory_budget_bytes": budget, "storage_mbps": mbps, "num_draft_tokens": tree},
        "key": "k", "exit": "ok" if speed else "oom-killed", "reason": None if speed else "killed",
        "tokens_per_second": speed, "predicted_tokens_per_second": speed,
        "mean_acceptance_length": None if tree == 0 else 3.0, "bytes_per_pass": 10**9,
        "storage_bytes_per_second": 2e9, "peak_anonymous_bytes": GIB, "n_prompts": 1,
        "n_tokens": 9, "provenance": PROVENANCE,
        "acceptance_by_depth": None if tree == 0 else [{"tried": 6, "accepted": 5}],
    }  # fmt: skip


def curve() -> dict[str, Any]:
    points = [
        {
            "rate": rate, "n_draft_tokens": n, "accuracy": rate, "tokens_per_pass": 2.0,
            "expected_tokens_per_pass": 2.1, "standard_error": 0.1, "tokens_per_second": 3.0,
            "speedup": 1.9 + rate, "predicted_speedup": 2.0 + rate, "pass_seconds": 1.0 + n * rate,
            "plain_pass_seconds": 1.0, "efficiency": 0.97, "passes": 30,
        }
        for rate in (0.5, 0.9)
        for n in (2, 8)
    ]  # fmt: skip
    return {
        "points": points,
        "best": [{"rate": 0.5, "n_draft_tokens": 2, "speedup": 2.4}],
        "differences": [], "n_texts": 6, "records": [], "model": "/m/grown",
        "memory_budget_bytes": GIB, "n_prompts": 1, "max_tokens": 9, "provenance": PROVENANCE,
    }  # fmt: skip


def policy() -> dict[str, Any]:
    row = {"mean_acceptance_length": 3.0, "mean_tree_nodes": 16.0, "draft_share": 0.05}
    return {
        "rows": [
            {**row, "way": "16x8", "tokens_per_second": 2.0, "is_lossless": True},
            {**row, "way": "auto", "tokens_per_second": 1.9, "is_lossless": False},
        ],
        "best_fixed": "16x8", "auto_versus_best_fixed": 0.95, "auto_versus_plain": None,
        "model": "/m/grown", "plan": {"memory_budget_bytes": GIB}, "records": [],
        "provenance": PROVENANCE,
    }  # fmt: skip


def prediction() -> dict[str, Any]:
    figures = {"pass_seconds": 1.25, "tokens_per_second": 0.8}
    error = {"pass_seconds": -0.04, "tokens_per_second": 0.05}
    kind = {"n_rows": 17, "predicted": figures, "measured": figures, "error": error}
    row = {"model": "/m/grown", "memory_budget": "1GiB", "storage_mbps": 800}
    return {
        "settings": [{**row, "plain": {**kind, "n_rows": 1}, "speculative": kind}],
        "largest_error": 0.05, "provenance": PROVENANCE,
    }  # fmt: skip


PICTURE = b"\x89PNG\r\n\x1a\n and so on"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    values = {
        "peers": comparison(), "speedup": speedup(), "budgets": budgets(), "curve": curve(),
        "policy": policy(), "prediction": prediction(),
    }  # fmt: skip
    found = {}
    for kind, value in values.items():
        found[kind] = tmp_path / f"{kind}.json"
        found[kind].write_text(json.dumps(value))
    found["picture"] = tmp_path / "run.png"
    found["picture"].write_bytes(PICTURE)
    lines = [
        sweep_line(
            budget, mbps, tree, None if budget == 3 * GIB and tree == 0 else 1.0 + budget / GIB
        )
        for budget in (GIB, 2 * GIB, 3 * GIB)
        for mbps in (90.0, None)
        for tree in (0, None)
    ]
    found["sweep"] = tmp_path / "sweep.jsonl"
    found["sweep"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


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
            ["10.00 times plain", "3 of 4"],
        ),
        ("budgets", ["budgets-grown"], ["killed by the kernel", "1.5GiB"]),
        ("sweep", ["budgets-sweep", "acceptance"], ["tree: auto", "oom-killed"]),
        ("curve", ["curve-curve"], ["0.50: 2 (2.40x)", "2.10 ± 0.10", "6 of 6 texts"]),
        ("policy", ["speed-policy"], ["0.950 times the speed", "LOSSY (--accept-threshold)"]),
        ("prediction", [], ["Largest error 5.0%", "-4.0%", "1.250"]),
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
    # Self-contained, and nothing of a file's text becomes a tag.
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "<x>" not in text
    for name in pictures:
        assert (page.parent / f"page-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_bars_over_other_texts_say_over_which(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    record = {"prompt": "a", "token_ids": [1, 2, 3]}
    peer = {**speedup()["plain"], "name": "llama.cpp", "prompts": [record, record]}
    ratios = {"plain": {"ratio": 2.5, "n_prompts": 2, "n_tokens": 4}}
    path.write_text(json.dumps({**speedup(), "peer": peer, "ratios": ratios}))
    results = read_results(path)
    assert [bar.note for bar in bars(results)] == [
        "2 prompts, 6 tokens",
        "4 prompts, 41 tokens",
        "4.0 tokens per pass; 4 prompts, 41 tokens",
    ]
    [table] = tables(results)
    assert "Plain is 2.50 times llama.cpp, over the same 2 prompts, 4 tokens." in table.note
    rows = [peer_row("accelerate", 0.5, n_tokens=9), peer_row("specdec", 1.0)]
    path.write_text(json.dumps({**comparison(), "peers": rows}))
    notes = [bar.note for bar in bars(read_results(path))]
    assert notes == ["2 prompts, 9 tokens", "2 prompts, 20 tokens"]


def test_text_that_is_not_the_targets_own_is_told(tmp_path: Path) -> None:
    one = speedup()
    one["speculative"]["is_lossless"] = False
    (tmp_path / "speedup.json").write_text(json.dumps(one))
    several = budgets()
    several["budgets"][1]["is_lossless"] = False
    (tmp_path / "budgets.json").write_text(json.dumps(several))
    for name, n_bars in (("speedup", 1), ("budgets", 0)):
        results = read_results(tmp_path / f"{name}.json")
        assert sum("LOSSY" in bar.note for bar in bars(results)) == n_bars
        assert ["LOSSY" in point.series for point in points([results])].count(True) == 1
        [table] = tables(results)
        assert ["LOSSY" in " ".join(row) for row in table.rows].count(True) == 1


def test_all_kinds_on_one_page(files: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", *map(str, files.values()), "-o", str(page)]) == 0
    assert page.read_text().count("<details>") == 7  # a picture has no provenance


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
    shares = [one.name.partition(":")[0] for one in depths(read_all(both))]
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
    found = points(results.values())
    assert len(found) == (12 - 2) + 1 + 2  # no point where there was no speed
    slowed = [point for point in found if point.storage_mbps == 90.0]
    assert {point.storage_bytes_per_second for point in slowed} == {90e6}
    sums = {one.name: (one.tried, one.accepted) for one in depths(results.values())}
    assert sums["peers: specdec"] == ((9, 6), (6, 3))
    assert sums["sweep: tree: auto"] == ((36,), (30,))
    assert sums["speedup: specdec"] == ((10, 8), (8, 4))  # two rounds at depth 3 say nothing
    assert [one.name for one in depths([results["peers"]])] == ["specdec"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "notes", '{"peers": 3}', '{"setting": {}}\n3\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match="holds no results") as caught:
        read_results(path)
    assert "\n" not in str(caught.value)


def test_missing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["report", str(tmp_path / "none.json"), "-o", str(tmp_path / "r.html")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_curves_lines_and_points(files: dict[str, Path]) -> None:
    found = curves(read_results(files["curve"]))
    assert [one.n_draft_tokens for one in found] == [2, 8]
    rates, speedups, errors = zip(*found[0].measured, strict=True)
    assert rates == (0.5, 0.9)
    assert speedups == pytest.approx((2.4, 2.8))
    assert errors == pytest.approx((2.4 * 0.1 / 2.1, 2.8 * 0.1 / 2.1))
    assert found[0].relative_pass_seconds == pytest.approx((2.0 * 2.8) ** 0.5)
    assert found[0].predicted(0.5) == pytest.approx((1 + 0.5 + 0.25) / (2.0 * 2.8) ** 0.5)
    assert curves(read_results(files["speedup"])) == []


def test_points_without_a_pass_are_not_drawn(tmp_path: Path) -> None:
    value = curve()
    for point in value["points"]:
        if point["n_draft_tokens"] == 8:
            point |= {"pass_seconds": None, "efficiency": None, "speedup": 0.0}
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(value))
    assert [one.n_draft_tokens for one in curves(read_results(path))] == [2]


@pytest.mark.parametrize("kind", ["peers", "speedup", "budgets", "sweep", "curve", "policy"])
def test_damaged_results_are_named_and_nothing_is_written(
    files: dict[str, Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page, damaged = tmp_path / "page.html", tmp_path / f"damaged-{kind}.json"
    page.write_text("mine")
    value = read_results(files[kind]).value
    value = value["settings"][0] if kind == "sweep" else value
    damaged.write_text(json.dumps(_without_figures(value)))
    assert main(["report", str(damaged), "-o", str(page)]) == 2
    error = capsys.readouterr().err
    assert f"{damaged} is damaged, or of another version" in error
    assert error.count("\n") == 1
    assert page.read_text() == "mine"
    assert len(list(tmp_path.glob("*.png*"))) <= 1


def _without_figures(value: dict[str, Any]) -> dict[str, Any]:
    """The keys that tell the kind of results, with nothing useful behind them."""
    return {key: [{}] if isinstance(one, list) else {} for key, one in value.items()}


def test_results_are_not_written_over(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files["peers"].read_bytes()
    assert main(["report", str(files["peers"]), "-o", str(files["peers"])]) == 2
    assert "is one of the results: name another page with -o" in capsys.readouterr().err
    assert files["peers"].read_bytes() == before


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    write_json({"a": 1}, device)
    assert device.resolve() == Path("/dev/null")
    assert device.is_char_device()
    with pytest.raises(ResultsError, match="cannot write /dev/full: No space left"):
        write_json({"a": 1}, Path("/dev/full"))
    assert Path("/dev/full").is_char_device()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_json({"a": 1}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")

    def fill(self: Path, data: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(ResultsError, match="name a file where there is room"):
        write_json({"a": 1}, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]

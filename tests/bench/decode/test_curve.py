"""`specdec-bench curve` on tiny targets: formula, equal sequences, report."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from interrupting import InterruptedAt
from tiny_pair import save_model

import specdec
from bench.__main__ import main
from bench.commands.curve import parse_lengths, parse_rates
from bench.decode.curve import CurveError, CurveSettings, CurveSpec, load_keywords, measure_curve
from bench.decode.curve_figures import summarise
from bench.decode.known_drafter import expected_tokens
from bench.options import UsageMistake
from bench.prompts.workloads import Prompt
from bench.report.tables import tables
from bench.table import text_of
from specdec.engine.stream import GenerationStream
from specdec.metrics.stats import GenerationStats

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPTS = [Prompt("add", "def add(a, b):"), Prompt("sum", "total = ")]
SETTINGS = CurveSettings((0.5, 0.9), (1, 4, 8), max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("curve") / "target", seed=1)


def measured(model: str | Path, settings: CurveSettings, prompts: list[Prompt]) -> dict[str, Any]:
    load = {"model": str(model), "ctx_size": 512, "threads": 1}
    with specdec.load(**load_keywords(load, settings)) as llm:
        return measure_curve(llm, prompts, settings, io.StringIO())


@pytest.fixture(scope="module")
def result(target: Path) -> dict[str, Any]:
    return measured(target, SETTINGS, PROMPTS)


# --- measurement ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_tokens_per_pass_are_those_of_the_formula(result: dict[str, Any]) -> None:
    points = result["points"]
    assert [(p["rate"], p["n_draft_tokens"]) for p in points] == [
        (rate, length) for rate in SETTINGS.rates for length in SETTINGS.lengths
    ]
    for point in points:
        expected = expected_tokens(point["rate"], point["n_draft_tokens"])
        assert point["expected_tokens_per_pass"] == expected
        assert abs(point["tokens_per_pass"] - expected) <= 4 * point["standard_error"]
        assert abs(point["accuracy"] - point["rate"]) < 0.15


@pytest.mark.slow
def test_every_output_is_that_of_plain_decoding(result: dict[str, Any]) -> None:
    assert result["is_exact"]
    assert result["differences"] == []
    assert result["num_seqs"] == len(result["records"]) == 2 * 2 * (1 + 3)
    for prompt in PROMPTS:
        outputs = [r["token_ids"] for r in result["records"] if r["prompt"] == prompt.name]
        longest = max(outputs, key=len)
        assert all(text == longest[: len(text)] for text in outputs)
        assert sorted(map(len, outputs))[:2] == [SETTINGS.max_tokens // 4] * 2  # plain decoding
        assert sorted(map(len, outputs))[2] >= SETTINGS.max_tokens


def test_no_chain_is_cut_off(result: dict[str, Any]) -> None:
    for record in result["records"]:
        assert {item[0] for item in record["pass_times"]} == {1 + record["n_draft_tokens"]}
        assert len(record["pass_times"]) == record["stats"]["passes"]


def test_a_slow_reader_cuts_off_no_chain(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not wait for whoever reads its output."""
    take = GenerationStream.__next__

    def take_slowly(stream: GenerationStream) -> Any:
        chunk = take(stream)
        stream._request.wait(60.0)
        return chunk

    monkeypatch.setattr(GenerationStream, "__next__", take_slowly)
    settings = CurveSettings((0.9,), (4,), max_tokens=20, ignore_eos=True)
    records = measured(target, settings, PROMPTS[:1])["records"]
    assert [len(record["token_ids"]) for record in records][0] == 9
    assert 20 <= len(records[1]["token_ids"]) <= 24
    test_no_chain_is_cut_off({"records": records})


def test_turns_begin_with_another_length_each_time(result: dict[str, Any]) -> None:
    lengths = [record["n_draft_tokens"] for record in result["records"]]
    turns = [tuple(lengths[i : i + 4]) for i in range(0, len(lengths), 4)]
    assert turns == [(0, 1, 4, 8), (1, 4, 8, 0), (1, 4, 8, 0), (4, 8, 0, 1)]


def test_the_output_may_end_early(target: Path) -> None:
    """The end-of-sequence token is the fifth token of the output."""
    load = {"model": str(target), "ctx_size": 512, "threads": 1}
    settings = CurveSettings((0.9,), (3,), max_tokens=20)
    with specdec.load(**load_keywords(load, settings)) as llm:
        text = llm.generate(PROMPTS[0].text, max_tokens=20, ignore_eos=True).token_ids
        session = llm.session
        session._factory = replace(session._factory, eos_token_ids=(text[5],))
        result = measure_curve(llm, PROMPTS[:1], settings, io.StringIO())
    end = text.index(text[5]) + 1
    assert [tuple(r["token_ids"]) for r in result["records"]] == [text[:end]] * 2
    assert "0.90" in text_of(tables("curve", {**result, "enforced": False, "model": "m"}))


def test_a_prompt_that_does_not_fit(target: Path) -> None:
    with pytest.raises(CurveError, match="give -c 1000014"):
        measured(target, CurveSettings((0.5,), (1,), max_tokens=999_999), PROMPTS[:1])


@pytest.mark.gguf
def test_a_gguf_target() -> None:
    pytest.importorskip("llama_cpp")
    settings = CurveSettings((0.9,), (1, 6), max_tokens=48, ignore_eos=True)
    result = measured("pair:draft.gguf", settings, PROMPTS[:1])
    assert result["is_exact"]
    assert result["differences"] == []
    for point in result["points"]:
        assert abs(point["accuracy"] - 0.9) < 0.2
        assert point["pass_seconds"] > 0


def test_an_interrupted_run_keeps_what_it_measured(target: Path, tmp_path: Path) -> None:
    load = {"model": str(target), "ctx_size": 512, "threads": 1}
    settings = CurveSettings((0.9,), (1, 4), max_tokens=12, ignore_eos=True)
    log = tmp_path / "log.jsonl"
    with (
        specdec.load(**load_keywords(load, settings)) as llm,
        pytest.raises(KeyboardInterrupt),
    ):
        measure_curve(llm, PROMPTS[:1], settings, InterruptedAt(2), log)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["n_draft_tokens"] for record in records] == [0, 1]
    assert all(record["token_ids"] and record["pass_times"] for record in records)


# --- results --------------------------------------------------------------------------------------


def record(n: int, seconds_per_pass: float, n_passes: int = 10, accepted: int = 0) -> Any:
    stats = GenerationStats(
        generated_tokens=1 + n_passes + accepted,
        passes=n_passes,
        accepted_tokens=accepted,
        drafted_tokens=n * n_passes,
        decode_seconds=1.25 * n_passes * seconds_per_pass if n else n_passes * seconds_per_pass,
    )
    times = [[1 + n, seconds_per_pass, False]] * n_passes
    return {"rate": 0.5, "n_draft_tokens": n, "stats": stats.to_dict(), "pass_times": times}


def test_points_from_records() -> None:
    """Passes take twice the time and yield 3 tokens; the loop adds a quarter."""
    (point,) = summarise([record(0, 1.0), record(4, 2.0, accepted=20)])["points"]
    assert (point["plain_pass_seconds"], point["pass_seconds"]) == (1.0, 2.0)
    assert point["tokens_per_pass"] == pytest.approx(3.0)
    assert point["speedup"] == pytest.approx(3.0 / 2.0 / 1.25)
    assert point["efficiency"] == pytest.approx(1 / 1.25)
    assert point["predicted_speedup"] == pytest.approx(expected_tokens(0.5, 4) / 2)


def test_the_fastest_chain_of_each_rate() -> None:
    records = [record(0, 1.0), record(2, 1.0, accepted=10), record(4, 2.0, accepted=20)]
    result = summarise(records)
    assert result["best"] == [
        {"rate": 0.5, "n_draft_tokens": 2, "speedup": pytest.approx(2.0 / 1.25)}
    ]


# --- command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "curve.json"
    argv = f"curve -m {target} --threads 1 -c 512 --rates 0.8 --sizes 3 -n 12 --n-prompts 1"
    log = tmp_path / "log.jsonl"
    argv += f" --ignore-eos --output-file {file} --log {log}"
    assert main(argv.split()) == 0
    out, err = capfd.readouterr()
    assert "sequences equal to plain decoding's: 2 of 2" in out
    assert "fastest chain by rate: 0.80: 3" in out
    assert err.count("\n") == 2, err  # one line of progress per decoding
    report = json.loads(file.read_text())
    assert [json.loads(line) for line in log.read_text().splitlines()] == report["records"]
    assert report["n_prompts"] == 1
    assert report["model"] == str(target)
    assert "git_revision" in report["provenance"]


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_difference_is_an_error_after_the_report(
    is_exact: bool, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """On an inexact target, only a difference that no near tie explains is an error."""
    where = {"prompt": "a", "position": 3}
    tie = where if is_exact else {**where, "gap": 2.0, "drift": 0.1, "explained": False}
    records = [record(0, 1.0), record(4, 2.0, accepted=20)]
    for item, tokens in zip(records, ([1, 2, 3, 4], [1, 2, 3, 9]), strict=True):
        item["stats"]["is_exact"] = is_exact
        item |= {"prompt": "a", "token_ids": tokens}
    result = {
        **summarise(records), "differences": [tie], "records": records, "num_seqs": 2,
        "enforced": False, "model": "m", "memory_budget_bytes": 1 << 30, "n_prompts": 1,
        "max_tokens": 9,
    }  # fmt: skip
    monkeypatch.setattr("bench.decode.curve.run_curve", lambda *_, **__: result)
    assert main(["curve", "-m", str(target)]) == 2
    out, err = capsys.readouterr()
    assert ("an ERROR, the target is exact" if is_exact else "NOT a near tie") in out
    assert (
        "two outputs for a differ from token 3 on" if is_exact else "1 of 2 sequences differ"
    ) in err
    assert err.count("\n") == 1


def test_a_specification_survives_its_transfer_to_a_process() -> None:
    spec = CurveSpec({"model": "m"}, PROMPTS, SETTINGS, "log.jsonl")
    assert CurveSpec.of(json.loads(json.dumps(asdict(spec)))) == spec


def test_lists_of_rates_and_lengths() -> None:
    assert parse_rates("0.5, 0.95,1,0.5") == (0.5, 0.95, 1.0)
    assert parse_lengths("1, 64,1") == (1, 64)


@pytest.mark.parametrize("text", ["", "0", "1.1", "-0.5", "nan", "inf", "x", "0.5,"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(UsageMistake, match="above 0"):
        parse_rates(text)


@pytest.mark.parametrize("text", ["", "0", "1025", "-1", "2.5", "4,", "²"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageMistake, match="from 1 to 1024"):
        parse_lengths(text)

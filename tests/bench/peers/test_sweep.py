"""The sweep runs every setting once, also after an interruption."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fake_peers
import pytest
from tiny_pair import save_model

from bench.commands.sweep import describe
from bench.peers import registry as peers
from bench.peers.program import Task
from bench.peers.registry import Weights
from bench.peers.runs import RunSettings
from bench.peers.sweep import (
    Setting,
    Sweep,
    all_settings,
    drop_torn_line,
    measure_setting,
    reference_outputs,
    run_sweep,
    setting_key,
)
from bench.process.results import ResultsError, read_results
from bench.prompts.workloads import Prompt
from offload.process.limited import OK, Limits, Outcome
from offload.storage.read_limit import ReadLimit
from offload.units import GIB

OUR_PEERS = dict(peers.PEERS)


@pytest.fixture(autouse=True)
def _fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install_as_specdec(tmp_path, monkeypatch)


def sweep_of(target: Path, **more: Any) -> Sweep:
    values = {
        "memory_bytes": 0, "n_tokens": 10, "seconds": 20.0, "n_threads": 1, "n_ctx": 64,
        "enforce": False,
    }  # fmt: skip
    weights = Weights.of(target, target)
    return Sweep(weights, (Prompt("a", "x"),), RunSettings(**{**values, **more}))


def test_settings_cover_every_combination() -> None:
    settings = all_settings([1, 2], [90.0, None], [0, None])
    assert len(set(settings)) == 8
    assert settings[0] == Setting(2, None, 0)  # the fastest first
    assert settings[-1] == Setting(1, 90.0, None)


def test_a_second_start_measures_only_what_is_missing(target: Path, tmp_path: Path) -> None:
    sweep, file = sweep_of(target), tmp_path / "sweep.jsonl"
    settings = all_settings([GIB], [None], [0, None])
    first = list(run_sweep(sweep, settings[:1], file, {}))
    with file.open("a") as out:
        out.write('{"setting": {"memory_bu')  # killed in the middle of a line
    second = list(run_sweep(sweep, settings, file, {}))
    assert [line is None for line in second] == [True, False]
    lines = read_results(file).value["settings"]
    assert [line["setting"]["num_draft_tokens"] for line in lines] == [0, None]
    assert first[0] == lines[0]
    assert lines[1]["mean_acceptance_length"] == pytest.approx(3.0)
    assert list(run_sweep(sweep, settings, file, {})) == [None, None]


def test_other_models_prompts_and_lengths_are_other_measurements(
    target: Path, tmp_path: Path
) -> None:
    setting = Setting(GIB, None, None)
    base = setting_key(sweep_of(target), setting)
    assert base == setting_key(sweep_of(target, seconds=1.0), setting)
    changed = save_model(tmp_path / "other", seed=1)
    keys = {
        base,
        setting_key(sweep_of(target), Setting(GIB, 90.0, None)),
        setting_key(sweep_of(target, n_tokens=11), setting),
        setting_key(sweep_of(changed), setting),
        setting_key(sweep_of(target, load={"tree_width": 2}), setting),
        setting_key(sweep_of(target, n_ctx=65), setting),
        setting_key(sweep_of(target, n_threads=2), setting),
        setting_key(sweep_of(target, enforce=True), setting),
        setting_key(replace(sweep_of(target), prompts=(Prompt("a", "y"),)), setting),
        setting_key(replace(sweep_of(target), weights=Weights.of(target, changed)), setting),
        setting_key(replace(sweep_of(target), weights=Weights.of(target, "mtp")), setting),
    }
    assert len(keys) == 11


def test_a_settings_process_is_limited_to_it(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run: only root could."""
    for name in ("specdec", "specdec-plain"):
        monkeypatch.setitem(peers.PEERS, name, OUR_PEERS[name])
    actual: list[tuple[Task, Limits]] = []

    def run_limited(argv: list[str], limits: Limits, env: Any, log: Path) -> Outcome:
        actual.append((Task.read(Path(argv[-2])), limits))
        return Outcome(OK, 0, 1.0, 0, None, 0)

    monkeypatch.setattr("offload.process.limited.run_limited", run_limited)
    sweep = sweep_of(target, enforce=True, load={"tree_width": 2})
    for setting in (Setting(2 * GIB, 90.0, 16), Setting(GIB, None, None)):
        measure_setting(sweep, setting)
        task, limits = actual[-1]
        assert task.memory_bytes == limits.memory_bytes == setting.memory_budget_bytes
        assert task.options == {"tree_width": 2, "num_draft_tokens": setting.num_draft_tokens}
        assert task.draft == str(target)
    assert actual[0][1].reads == ReadLimit(target, 90_000_000)
    assert actual[1][1].reads is None
    measure_setting(sweep_of(target), Setting(GIB, None, 0))
    task, limits = actual[-1]
    assert (task.draft, limits.memory_bytes) == (None, None)


def test_outputs_are_compared_with_the_first_settings_or_a_reports(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = iter([[1, 2, 3], [1, 2], [1, 9, 3]])

    def measure(sweep: Sweep, setting: Setting) -> dict[str, Any]:
        record = {"prompt": "a", "token_ids": next(outputs)}
        return {"setting": asdict(setting), "records": [record]}

    monkeypatch.setattr("bench.peers.sweep.measure_setting", measure)
    settings = all_settings([3, 2, 1], [None], [0])
    file = tmp_path / "sweep.jsonl"
    lines = list(run_sweep(sweep_of(target), settings[:1], file, {}))
    lines += list(run_sweep(sweep_of(target), settings, file, {}))[1:]
    assert [line and line["n_equal_outputs"] for line in lines] == [1, 1, 0]
    assert lines[2] is not None
    assert lines[2]["first_mismatch"] == {"a": 1}
    report = tmp_path / "report.json"
    records = [{"prompt": "a", "mode": mode, "token_ids": [1]} for mode in ("plain", "speculative")]
    report.write_text(json.dumps({"plain": {}, "speculative": {}, "records": records}))
    assert reference_outputs(report) == reference_outputs(file) | {"a": [1]}
    report.write_text('{"peers": []}')
    with pytest.raises(ResultsError, match="give a report of speedup"):
        reference_outputs(report)


def test_a_failure_is_a_result_too(target: Path, tmp_path: Path) -> None:
    sweep = Sweep(Weights.of(target, target), (Prompt("a", "crash"),), sweep_of(target).base)
    file = tmp_path / "sweep.jsonl"
    [line] = run_sweep(sweep, [Setting(GIB, None, None)], file, {})
    assert line is not None
    assert line["exit"] == "failed"
    assert "no kernel" in describe(Setting(GIB, None, None), line)
    assert len(read_results(file).value["settings"]) == 1


def test_another_file_is_not_written_to(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("notes\n")
    with pytest.raises(ResultsError, match="holds no results"):
        list(run_sweep(sweep_of(target), [Setting(GIB, None, 0)], file, {}))
    assert file.read_text() == "notes\n"


def test_results_of_another_command_are_not_written_to(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for text, kind in (('{"peers": []}\n', "peers"), ('{"points": []}\n', "curve")):
        file.write_text(text)
        with pytest.raises(ResultsError, match=f"holds results of {kind}: name another file"):
            list(run_sweep(sweep_of(target), [Setting(GIB, None, 0)], file, {}))
        assert file.read_text() == text


def test_a_file_of_something_else_is_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for text in ('{"a":1}', 'x\n{"a":1}'):
        path.write_text(text)
        with pytest.raises(ResultsError, match="ends in a line that no sweep wrote"):
            drop_torn_line(path)
        assert path.read_text() == text
    for torn in ("{", '{"setting', '{"setting": {"memory_bu', ""):
        path.write_text("whole\n" + torn)
        drop_torn_line(path)
        assert path.read_text() == "whole\n"
    with pytest.raises(ResultsError, match="not a regular file"):
        drop_torn_line(Path("/dev/full"))

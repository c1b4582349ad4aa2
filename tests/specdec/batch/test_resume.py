"""An interrupted batch: no line lost, none answered twice, the same output."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import pytest
from batches import Killed, Machine, files_in, mixed, partial_of, run, whole, write_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.batch.journal import INPUT, ORDERS
from specdec.batch.lines import BatchError, Line


def kill_after(seconds: float, work: Callable[[], object]) -> None:
    """Run it in a fork that is killed by SIGKILL after a delay, unless it has finished."""
    child = get_context("fork").Process(target=work)
    child.start()
    child.join(seconds)
    child.kill()
    child.join()


def killed_at_the_sixth(lines: Iterable[Line]) -> Iterator[Line]:
    yield from islice(lines, 5)
    os.kill(os.getpid(), signal.SIGKILL)


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n_before", range(9))
def test_an_end_after_any_line(source: Path, out: Path, n_before: int, order: str) -> None:
    first, second = Machine(mixed, n_before), Machine(mixed)
    if n_before < 8:
        with pytest.raises(Killed):
            run(source, out, first, order)
        assert not out.exists()
        assert partial_of(out).exists() == (n_before > 0)
    metrics = run(source, out, second, order)
    assert metrics.n_before == (n_before if n_before < 8 else 0)
    assert sorted(first.numbers + second.numbers)[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    records = out.read_bytes().splitlines(keepends=True)
    expected = whole(source, order).splitlines(keepends=True)
    assert sorted(records) == sorted(expected)
    if order == INPUT:
        assert records == expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_kill_between_the_output_and_the_end_of_the_partial_file(
    source: Path, out: Path, order: str
) -> None:
    with pytest.raises(Killed):
        run(source, out, Machine(mixed, 7), order)
    before = partial_of(out).read_bytes()
    run(source, out, Machine(), order)
    expected = out.read_bytes()
    partial_of(out).write_bytes(before)
    out.with_name("out.jsonl.whole").write_bytes(b"half of it")
    machine = Machine()
    run(source, out, machine, order)
    assert machine.numbers == []
    assert out.read_bytes() == expected
    assert files_in(source.parent) == {"in.jsonl", "out.jsonl"}


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.floats(0, 0.04), max_size=5), st.randoms(use_true_random=False))
def test_kills_at_any_moment(
    tmp_path_factory: pytest.TempPathFactory, delays: list[float], chance: random.Random
) -> None:
    """SIGKILL comes while a process opens the journal, writes a record, finishes, or is done."""
    directory = tmp_path_factory.mktemp("kills")
    source, out = write_prompts(directory / "in.jsonl", 20), directory / "out.jsonl"

    def shuffled(lines: Iterable[Line]) -> Iterator[Line]:
        waiting: list[Line] = []
        for line in lines:
            waiting.append(line)
            if len(waiting) == 4:
                yield waiting.pop(chance.randrange(4))
        yield from waiting

    for delay in delays:
        kill_after(delay, lambda: run(source, out, Machine(shuffled)))
    machine = Machine(shuffled)
    metrics = run(source, out, machine)
    assert len(machine.numbers) == 20 - metrics.n_before
    assert out.read_bytes() == whole(source)
    assert files_in(directory) == {"in.jsonl", "out.jsonl", "undisturbed.jsonl"}


def test_a_killed_process_loses_no_answer(source: Path, out: Path) -> None:
    kill_after(60, lambda: run(source, out, Machine(killed_at_the_sixth)))
    machine = Machine()
    run(source, out, machine)
    assert machine.numbers == [6, 7, 8]
    assert out.read_bytes() == whole(source)


def test_a_log_without_its_database_is_nothing(source: Path, out: Path) -> None:
    """OUT.partial was removed to start over, and the log of a killed process is still there."""
    kill_after(60, lambda: run(source, out, Machine(killed_at_the_sixth), temperature=1))
    partial_of(out).unlink()
    assert files_in(source.parent) == {"in.jsonl", "out.jsonl.partial-wal"}
    machine = Machine()
    run(source, out, machine)
    assert machine.numbers == [1, 2, 3, 4, 5, 6, 7, 8]
    assert files_in(source.parent) == {"in.jsonl", "out.jsonl"}


def test_an_output_with_lines_missing_does_not_appear(source: Path, out: Path) -> None:
    """The input was truncated while it was answered."""
    with pytest.raises(BatchError, match="5 of 8 lines"):
        run(source, out, Machine(lambda lines: islice(lines, 5)))
    assert not out.exists()
    run(source, out)
    assert out.read_bytes() == whole(source)


# --- output of another batch ----------------------------------------------------------------------


def test_the_same_command_again_has_nothing_to_do(source: Path, out: Path) -> None:
    run(source, out)
    before = out.read_bytes()
    machine = Machine()
    metrics = run(source, out, machine)
    assert machine.numbers == []
    assert (metrics.n_answered, metrics.n_before) == (8, 8)
    assert out.read_bytes() == before
    assert not partial_of(out).exists()


@pytest.mark.parametrize("n_before", [3, 8])
def test_an_input_that_has_grown(source: Path, out: Path, n_before: int) -> None:
    if n_before == 8:
        run(source, out)
    else:
        with pytest.raises(Killed):
            run(source, out, Machine(n_before_kill=n_before))
    write_prompts(source, 4, start=8)
    machine = Machine()
    run(source, out, machine)
    assert machine.numbers == list(range(n_before + 1, 13))
    assert out.read_bytes() == whole(source)


def test_an_input_that_grows_meanwhile(tmp_path: Path, out: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", 1)

    def growing(lines: Iterable[Line]) -> Iterator[Line]:
        for line in lines:
            if line.number == 1:
                write_prompts(source, 60, start=1)
            yield line

    run(source, out, Machine(growing))
    assert out.read_bytes() == whole(source)


@pytest.mark.parametrize("n_before", [3, 8])
@pytest.mark.parametrize("change", ["other", "shorter", "blank"])
def test_answered_lines_that_changed(source: Path, out: Path, n_before: int, change: str) -> None:
    if n_before == 8:
        run(source, out)
    else:
        with pytest.raises(Killed):
            run(source, out, Machine(n_before_kill=n_before))
    lines = source.read_text().splitlines(keepends=True)
    lines[1] = '{"prompt": "another"}\n' if change == "other" else "\n"
    source.write_text("".join(lines[:2] if change == "shorter" else lines))
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    with pytest.raises(BatchError, match=r"out\.jsonl answers .*remove .*to begin anew"):
        run(source, out, Machine())
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before


def test_other_options_are_named(source: Path, out: Path) -> None:
    with pytest.raises(Killed):
        run(source, out, Machine(n_before_kill=3), temperature=0.5, model="m")
    said = r"was begun with temperature 0.5, now it is 0.7: go on with the same"
    with pytest.raises(BatchError, match=said):
        run(source, out, temperature=0.7, model="m")
    with pytest.raises(BatchError, match=r"temperature 0.5, now it is null"):
        run(source, out, model="m")
    run(source, out, temperature=0.5, model="m")
    with pytest.raises(BatchError, match="with other options"):
        run(source, out, temperature=0.7, model="m")


@pytest.mark.parametrize("number", [10**17, 10**30])
def test_a_number_that_is_far_off(source: Path, out: Path, number: int) -> None:
    out.write_text(json.dumps({"line": number, "digest": "0" * 15 + "1"}) + "\n")
    with pytest.raises(BatchError, match=r"out\.jsonl (answers 1 lines|exists, and)"):
        run(source, out)
    assert files_in(source.parent) == {"in.jsonl", "out.jsonl"}

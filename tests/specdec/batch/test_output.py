"""The output of a batch: its order, its file, and concurrent writers."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from batches import Killed, Machine, files_in, mixed, partial_of, run, whole, write_prompts

from specdec.batch.journal import FINISHED, MADE_IN
from specdec.batch.lines import BatchError, Line

# --- one run --------------------------------------------------------------------------------------


def test_records_are_in_the_order_of_the_input(source: Path, out: Path) -> None:
    metrics = run(source, out, Machine(mixed))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert out.read_bytes() == whole(source)
    assert (
        metrics.n_lines,
        metrics.n_answered,
        metrics.n_before,
        metrics.n_errors,
    ) == (8, 8, 0, 1)
    assert (metrics.n_prompt_tokens, metrics.n_generated_tokens) == (16, 24)


def test_records_are_in_the_order_in_which_they_were_finished(source: Path, out: Path) -> None:
    machine = Machine(mixed)
    run(source, out, machine, FINISHED)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["line"] for record in records] == machine.numbers == [3, 2, 1, 6, 5, 4, 8, 7]


def test_nothing_else_is_left(source: Path, out: Path) -> None:
    run(source, out)
    assert files_in(source.parent) == {"in.jsonl", "out.jsonl"}


@pytest.mark.parametrize("text", ["", "\n", "\ufeff \t\r\n\n"])
def test_an_input_without_lines_is_refused(tmp_path: Path, out: Path, text: str) -> None:
    source = tmp_path / "empty.jsonl"
    source.write_text(text, encoding="utf-8")
    n_bytes = len(text.encode())
    message = (
        rf"empty\.jsonl has no line to answer in its {n_bytes} bytes: give a file with a request"
    )
    with pytest.raises(BatchError, match=message):
        run(source, out)
    assert files_in(out.parent) == {"empty.jsonl"}


def test_the_output_does_not_appear_before_its_end(source: Path, out: Path) -> None:
    def looking(lines: Iterable[Line]) -> Iterator[Line]:
        for line in lines:
            assert not out.exists()
            yield line

    run(source, out, Machine(looking))
    assert out.exists()


# --- other files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"my notes\n",
        b'{"a": 1}\n',
        b"notes without an end",
        b"[" * 5000,
        b"[1]\n",
        b"{\n",
        b'{"specdec_batch": 1, "options": {}}\n',  # a journal of an earlier version
    ],
)
def test_files_of_others_are_left_alone(source: Path, out: Path, content: bytes) -> None:
    for path in (out, partial_of(out)):
        path.write_bytes(content)
        with pytest.raises(BatchError, match="name another output file"):
            run(source, out)
        assert path.read_bytes() == content
        path.unlink()
        assert files_in(source.parent) == {"in.jsonl"}


def test_a_database_of_another_program_is_left_alone(source: Path, out: Path) -> None:
    with closing(sqlite3.connect(partial_of(out))) as database:
        database.execute("CREATE TABLE records (line INTEGER)")
    before = partial_of(out).read_bytes()
    with pytest.raises(BatchError, match="did not write it .*: name another output file"):
        run(source, out)
    assert partial_of(out).read_bytes() == before


def test_a_damaged_journal_is_refused(source: Path, out: Path) -> None:
    """The journal is cut anywhere, or contains a foreign page."""
    with pytest.raises(Killed):
        run(source, out, Machine(n_before_kill=7))
    full = partial_of(out).read_bytes()
    cut = [full[:n_bytes] for n_bytes in range(2, len(full), 997)]
    replaced = [full[:at] + b"\x07" * 4096 + full[at + 4096 :] for at in range(0, len(full), 4096)]
    for content in cut + replaced:
        partial_of(out).write_bytes(content)
        with pytest.raises(BatchError, match=r"\.partial is damaged, or .* move that one away"):
            run(source, out)
        assert partial_of(out).read_bytes() == content
        assert files_in(source.parent) == {"in.jsonl", partial_of(out).name}


def test_a_missing_folder_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"there is no folder .*nowhere for out\.jsonl: make it"):
        run(source, tmp_path / "nowhere" / "out.jsonl")


def test_the_input_is_no_output(source: Path) -> None:
    link = source.with_name("link.jsonl")
    link.symlink_to(source)
    for path in (source, link):
        with pytest.raises(BatchError, match="is the input"):
            run(source, path)
    for ending in MADE_IN:  # a temporary file of the output
        named = write_prompts(source.with_name("out.jsonl" + ending), 3)
        before = named.read_bytes()
        with pytest.raises(BatchError, match="is the input"):
            run(named, source.with_name("out.jsonl"))
        assert named.read_bytes() == before
    with pytest.raises(BatchError, match="is no regular file"):
        run(source, Path("/dev/null"))


def test_a_link_stays_one(source: Path, out: Path) -> None:
    link = out.with_name("link.jsonl")
    link.symlink_to(out)
    run(source, link)
    assert link.is_symlink()
    assert out.read_bytes() == whole(source)


# --- other processes ------------------------------------------------------------------------------


def test_two_processes_do_not_write_to_one_output(source: Path, out: Path) -> None:
    def second(lines: Iterable[Line]) -> Iterator[Line]:
        with pytest.raises(BatchError, match="another process writes to"):
            run(source, out)
        yield from lines

    run(source, out, Machine(second))
    assert out.read_bytes() == whole(source)


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Writes beyond the limit fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_at_any_byte(source: Path, out: Path) -> None:
    expected = whole(source)
    for n_bytes in range(1, 70_000, 3001):
        said = "cannot write .* free .*disk space"
        with file_size_limit(n_bytes), pytest.raises(BatchError, match=said):
            run(source, out)
        left = partial_of(out)
        assert files_in(source.parent) <= {"in.jsonl", "undisturbed.jsonl", left.name}
        run(source, out)
        assert out.read_bytes() == expected
        out.unlink()


def test_no_space_for_the_output(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With late allocation (a network's disk, say) a write succeeds and its sync fails."""

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    message = r"out\.jsonl\.whole: No space left on device; all answers are in"
    real = os.fsync
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(BatchError, match=message):
        run(source, out)
    monkeypatch.setattr("os.fsync", real)
    assert files_in(source.parent) == {"in.jsonl", partial_of(out).name}
    machine = Machine()
    run(source, out, machine)
    assert machine.numbers == []
    assert out.read_bytes() == whole(source)

"""A batch that was broken off: no line lost, none answered twice, the same output."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import pytest
from batches import Killed, Machine, run, write_prompts
from hypothesis import given
from hypothesis import strategies as st

from specdec.batch.journal import FINISHED, INPUT, ORDERS
from specdec.batch.lines import BatchError, Line


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", 8)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def whole(source: Path, order: str = INPUT) -> bytes:
    """The output of a run that nothing disturbs."""
    out = source.parent / "undisturbed.jsonl"
    out.unlink(missing_ok=True)
    run(source, out, order=order)
    return out.read_bytes()


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def backwards(lines: Iterable[Line]) -> Iterator[Line]:
    return reversed(list(lines))


def mixed(lines: Iterable[Line]) -> Iterator[Line]:
    """Three at a time in the machine, finished in another order."""
    lines = iter(lines)
    while some := list(islice(lines, 3)):
        yield from reversed(some)


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# --- a run -----------------------------------------------------------------------------------


def test_records_are_in_the_order_of_the_input(source: Path, out: Path) -> None:
    figures = run(source, out, Machine(mixed))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["line"] for one in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert out.read_bytes() == whole(source)
    assert (figures.n_lines, figures.n_answered, figures.n_before, figures.n_errors) == (8, 8, 0, 1)
    assert (figures.n_prompt_tokens, figures.n_generated_tokens) == (16, 24)


def test_records_are_in_the_order_in_which_they_were_finished(source: Path, out: Path) -> None:
    machine = Machine(mixed)
    run(source, out, machine, FINISHED)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["line"] for one in records] == machine.numbers == [3, 2, 1, 6, 5, 4, 8, 7]


def test_nothing_else_is_left(source: Path, out: Path) -> None:
    run(source, out)
    assert files_in(source.parent) == {"in.jsonl", "out.jsonl"}


def test_an_empty_input_gives_an_empty_output(tmp_path: Path, out: Path) -> None:
    run(write_prompts(tmp_path / "empty.jsonl", 0), out)
    assert out.read_bytes() == b""
    run(tmp_path / "empty.jsonl", out)


def test_the_output_does_not_appear_before_its_end(source: Path, out: Path) -> None:
    def looking(lines: Iterable[Line]) -> Iterator[Line]:
        for line in lines:
            assert not out.exists()
            yield line

    run(source, out, Machine(looking))
    assert out.exists()


# --- a kill ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n_before", range(9))
def test_an_end_after_any_line(source: Path, out: Path, n_before: int, order: str) -> None:
    first, second = Machine(mixed, n_before), Machine(mixed)
    if n_before < 8:
        with pytest.raises(Killed):
            run(source, out, first, order)
        assert not out.exists()
        assert partial_of(out).exists() == (n_before > 0)
    figures = run(source, out, second, order)
    assert figures.n_before == (n_before if n_before < 8 else 0)
    assert sorted(first.numbers + second.numbers)[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    records = out.read_bytes().splitlines(keepends=True)
    expected = whole(source, order).splitlines(keepends=True)
    assert sorted(records) == sorted(expected)
    if order == INPUT:
        assert records == expected


@pytest.mark.parametrize("arrange", [iter, backwards])
def test_a_partial_file_that_was_cut_at_any_byte(source: Path, out: Path, arrange) -> None:
    """As a kill in the middle of a write leaves it, or a power failure."""
    expected = whole(source)
    with pytest.raises(Killed):
        run(source, out, Machine(arrange, 7))
    full = partial_of(out).read_bytes()
    ends = [index + 1 for index, byte in enumerate(full) if byte == ord("\n")]
    for n_bytes in range(len(full) + 1):
        partial_of(out).write_bytes(full[:n_bytes])
        machine = Machine()
        run(source, out, machine)
        assert out.read_bytes() == expected, n_bytes
        n_kept = max(sum(end <= n_bytes for end in ends) - 1, 0)  # the header is not an answer
        assert len(machine.numbers) == 8 - n_kept, n_bytes
        assert not partial_of(out).exists()
        out.unlink()


def test_zeros_at_the_end_are_cut(source: Path, out: Path) -> None:
    """Of blocks that a file system gave out before the power failed."""
    with pytest.raises(Killed):
        run(source, out, Machine(n_before_kill=4))
    with open(partial_of(out), "ab") as file:
        file.write(bytes(5000))
    machine = Machine()
    run(source, out, machine)
    assert machine.numbers == [5, 6, 7, 8]
    assert out.read_bytes() == whole(source)


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


@given(st.lists(st.integers(0, 6), max_size=6), st.randoms(use_true_random=False))
def test_any_number_of_kills(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], chance: random.Random
) -> None:
    directory = tmp_path_factory.mktemp("kills")
    source, out = write_prompts(directory / "in.jsonl", 20), directory / "out.jsonl"

    def shuffled(lines: Iterable[Line]) -> Iterator[Line]:
        waiting: list[Line] = []
        for line in lines:
            waiting.append(line)
            if len(waiting) == 4:
                yield waiting.pop(chance.randrange(4))
        yield from waiting

    for n_before in kills:
        with suppress(Killed):
            run(source, out, Machine(shuffled, n_before))
        if partial_of(out).exists() and chance.random() < 0.7:
            size = partial_of(out).stat().st_size
            os.truncate(partial_of(out), max(size - chance.randrange(80), 0))
    run(source, out, Machine(shuffled))
    assert out.read_bytes() == whole(source)


def test_an_output_with_lines_missing_does_not_appear(source: Path, out: Path) -> None:
    """As when the input was cut while it was answered."""
    with pytest.raises(BatchError, match="5 of 8 lines"):
        run(source, out, Machine(lambda lines: islice(lines, 5)))
    assert not out.exists()
    run(source, out)
    assert out.read_bytes() == whole(source)


# --- an output of another batch --------------------------------------------------------------


def test_the_same_command_again_has_nothing_to_do(source: Path, out: Path) -> None:
    run(source, out)
    before = out.read_bytes()
    machine = Machine()
    figures = run(source, out, machine)
    assert machine.numbers == []
    assert (figures.n_answered, figures.n_before) == (8, 8)
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


@pytest.mark.parametrize(
    "content",
    [b"my notes\n", b'{"a": 1}\n', b"notes without an end", b"[" * 5000, b"[1]\n", b"{\n"],
)
def test_files_of_others_are_left_alone(source: Path, out: Path, content: bytes) -> None:
    for path in (out, partial_of(out)):
        path.write_bytes(content)
        with pytest.raises(BatchError, match="name another output file"):
            run(source, out)
        assert path.read_bytes() == content
        path.unlink()
        assert files_in(source.parent) == {"in.jsonl"}


def test_a_number_that_is_far_off_takes_no_memory(source: Path, out: Path) -> None:
    out.write_text(json.dumps({"line": 10**17, "digest": "0" * 15 + "1"}) + "\n")
    with pytest.raises(BatchError, match="answers another line 100000000000000000"):
        run(source, out)


def test_the_input_is_no_output(source: Path) -> None:
    link = source.with_name("link.jsonl")
    link.symlink_to(source)
    for path in (source, link):
        with pytest.raises(BatchError, match="is the input"):
            run(source, path)
    for ending in (".partial", ".whole"):  # what the output is made in
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


# --- others on the machine -------------------------------------------------------------------


def test_two_processes_do_not_write_to_one_output(source: Path, out: Path) -> None:
    def second(lines: Iterable[Line]) -> Iterator[Line]:
        with pytest.raises(BatchError, match="another process writes to"):
            run(source, out)
        yield from lines

    run(source, out, Machine(second))
    assert out.read_bytes() == whole(source)


def test_a_lock_on_a_file_that_was_removed_is_none(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that had it ended between our opening the file and locking it."""
    real, n_calls = fcntl.flock, 0

    def flock(descriptor: int, operation: int) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            partial_of(out).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    run(source, out)
    assert n_calls == 2
    assert out.read_bytes() == whole(source)


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Writes beyond it fail, as on a full disk."""
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
    for n_bytes in range(40, len(expected), 7):
        said = "cannot write .* make room"
        with file_size_limit(n_bytes), pytest.raises(BatchError, match=said):
            run(source, out)
        left = partial_of(out)
        assert not left.exists() or left.read_bytes().endswith(b"\n")
        assert files_in(source.parent) <= {"in.jsonl", "undisturbed.jsonl", left.name}
        run(source, out)
        assert out.read_bytes() == expected
        out.unlink()

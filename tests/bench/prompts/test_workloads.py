"""Valid and invalid prompt files, and the built-in one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.prompts import workloads
from bench.prompts.workloads import BUILT_IN, Prompt, PromptFileError, read_prompts, spread


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_prompt_and_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"task_id": "T/0", "prompt": "def f():", "other": 1}\n'
        "\n"
        '{"question_id": 7, "turns": ["first", "second"]}\n'
        '{"prompt": "caf\\u00e9"}\n',
    )
    assert read_prompts(path) == [
        Prompt("T/0", "def f():"),
        Prompt("7", "first"),
        Prompt("4", "café"),
    ]
    assert len(read_prompts(path, 2)) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "found int, not an object"),
        ('{"text": "x"}', "neither `prompt` nor `turns` \\(keys: text\\)"),
        ('{"prompt": 3}', "must be a text, found int"),
        ('{"turns": []}', "must be a list with at least one text"),
        ('{"turns": "abc"}', "must be a list"),
        ('{"prompt": "  "}', "the prompt is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path, '{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(PromptFileError, match=problem) as caught:
        read_prompts(path)
    assert f"{path}:2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_line_after_the_last_wanted_one_does_no_harm(tmp_path: Path) -> None:
    assert len(read_prompts(write(tmp_path, '{"prompt": "good"}\n{\n'), 1)) == 1


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(PromptFileError, match="holds no prompt"):
        read_prompts(write(tmp_path, text))


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompts.jsonl")
    with pytest.raises(PromptFileError, match="holds no prompt"):
        read_prompts(tmp_path / "prompts.jsonl")


def test_fewer_prompts_than_the_limit(tmp_path: Path) -> None:
    assert len(read_prompts(write(tmp_path, '{"prompt": "good"}\n'), 2)) == 1


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(PromptFileError, match="Is a directory"):
        read_prompts(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptFileError, match="byte 0 is not UTF-8"):
        read_prompts(tmp_path / "binary")


def test_categories_take_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "".join(
            f'{{"id": "{name}", "category": "{name[0]}", "prompt": "x"}}\n'
            for name in ("a1", "a2", "a3", "b1", "b2", "c1")
        )
        + '{"id": "none", "prompt": "x", "category": null}\n',
    )
    prompts = read_prompts(path)
    assert [prompt.category for prompt in prompts] == [*"aaabbc", ""]
    assert [p.name for p in spread(prompts, 6)] == ["a1", "b1", "c1", "none", "a2", "b2"]
    assert len(spread(prompts, 99)) == 7


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c"
    path = write(tmp_path, f'\ufeff{{"prompt": "{text}"}}\r\n{{"prompt": "d"}}')
    assert [prompt.text for prompt in read_prompts(path)] == [text, "d"]


def test_a_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "MAX_FILE_BYTES", 1000)
    with pytest.raises(PromptFileError, match="/dev/zero has more than 1000 B: split it"):
        read_prompts(Path("/dev/zero"))


def test_the_built_in_prompts() -> None:
    prompts = read_prompts(BUILT_IN, 16)
    assert len({prompt.text for prompt in prompts}) == 16

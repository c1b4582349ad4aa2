"""Exit codes of commands, as documented in docs/cli.md."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from tiny_pair import save_model

from specdec.cli.app import main
from specdec.cli.enforce import KILLED
from specdec.cli.errors import EXIT_BROKEN_PIPE, EXIT_ERROR, EXIT_INTERRUPTED

DOCS = Path(__file__).resolve().parents[3] / "docs"
OF_PYTHON, OF_SIGTERM = 1, 143


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = save_model(tmp_path_factory.mktemp("chatty") / "model", seed=1)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    return model


def chat(model: Path) -> int:
    return main(["chat", "-m", str(model), "-n", "3", "--threads", "1"])


def test_all_codes_are_documented() -> None:
    page = (DOCS / "cli.md").read_text()
    section = page[page.index("\n## Output and exit codes\n") : page.index("\n## specdec run\n")]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    ours = {0, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, KILLED}
    assert documented == ours | {OF_PYTHON, OF_SIGTERM}


def test_ctrl_c_at_the_prompt_ends_the_conversation(
    chatty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(io.StringIO):
        def readline(self, *_: object) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert chat(chatty) == 130
    assert capsys.readouterr().err == "specdec: interrupted\n"


def test_a_line_that_is_not_utf8_does_not_end_the_conversation(
    chatty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nmore\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert chat(chatty) == 2, "an answer is missing"
    error = capsys.readouterr().err
    assert "at position 3, which is no character but a byte that was not UTF-8" in error
    assert error.count("tok/s") == 1

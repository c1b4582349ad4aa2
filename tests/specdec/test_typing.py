"""Type checkers find mistakes in a user's program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).resolve().parent.parent
RIGHT = """
import asyncio
from collections.abc import Iterator

import specdec
from specdec import AsyncLLM, GenerationResult, SamplingParams

with specdec.load("TARGET", "DRAFT", memory_budget="3.5GiB", spec_type=("ngram",)) as llm:
    result: GenerationResult = llm.generate("a", max_tokens=64, stop=["b"], logit_bias={1: 2.0})
    several: list[GenerationResult] = llm.generate(["a", "b"], SamplingParams(n=2), priority=1)
    chat = llm.generate([{"role": "user", "content": "a"}], eos_token_ids=[1], logprobs=5)
    text: str = "".join(chunk.text for chunk in llm.stream("a", temperature=0.7, seed=1))
    print(result.to_dict()["text"], several[0].stats.tokens_per_second, chat.text, repr(llm))


async def main() -> None:
    async with await AsyncLLM.load("TARGET", memory_budget="1GiB") as llm:
        print((await llm.generate("a", max_tokens=3)).text)
        async for chunk in llm.stream("a", temperature=1.0):
            print(chunk.text)


asyncio.run(main())
"""
WRONG = """
import specdec

llm = specdec.load("TARGET")
llm.generate("a", max_token=64)
llm.stream("a", temperature="warm")
"""


def checked(script: str, folder: Path) -> list[str]:
    """Return mypy's errors about a script, as a user sees them: large libraries are skipped."""
    pytest.importorskip("mypy")
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nfollow_imports = silent\ncache_dir = cache\n"
        f"mypy_path = {ROOT}\nexplicit_package_bases = True\n"
        "[mypy-torch.*,transformers.*,huggingface_hub.*]\nfollow_imports = skip\n"
    )
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def test_mypy_finds_both_mistakes_and_no_other(tmp_path: Path) -> None:
    """The right program first: it fills mypy's cache."""
    assert checked(RIGHT, tmp_path) == []
    errors = checked(WRONG, tmp_path)
    assert {line.split(" error: ")[0] for line in errors} == {"script.py:5:", "script.py:6:"}
    assert 'did you mean "max_tokens"?' in errors[0]
    assert '"str"; expected "float"' in errors[-1]

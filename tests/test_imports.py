"""Imports go one way: bench -> specdec -> backends -> offload; and heavy libraries stay lazy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A package may import itself and those after it.
ORDER = ("bench", "specdec", "backends", "offload")
HEAVY = ("torch", "transformers")
# Modules of specdec that a run without torch (GGUF) needs.
TORCH_FREE = (
    "offload",
    "specdec",
    "specdec.cli.app",
    "specdec.config",
    "specdec.verification.tree",
    "specdec.verification.acceptance",
    "specdec.verification.block",
    "bench.rank.ranking",
    "specdec.sampling.sampler",
    "specdec.decoding.stats",
    "specdec.decoding.controller",
    "specdec.api",
    "specdec.planning.plan",
    "specdec.text.gguf_tokenizer",
    "backends.llama.source",
    "backends.shapes.gguf",
    "specdec.analysis.analyze",
    "specdec.devices.this_machine",
    "specdec.drafters.ngram",
)


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of every import in the file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import out from the package"
            yield node.lineno, (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package: str) -> None:
    above = set(ORDER[: ORDER.index(package)])
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in python_files(package)
        for line, module in imported_modules(path)
        if module in above or module == "tests"
    ]
    assert python_files(package)
    assert not wrong, "\n".join(wrong)


def test_offload_names_no_tensor_library() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in python_files("offload")
        for line, module in imported_modules(path)
        if module in (*HEAVY, "safetensors", "huggingface_hub", "accelerate")
    ]
    assert not wrong, "\n".join(wrong)


def submodules(package: str) -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in python_files(package)
        if path.stem != "__init__"
    ]


@pytest.mark.parametrize("module", [*TORCH_FREE, *submodules("offload")])
def test_imports_without_torch(module: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"importing {module} loaded {done.stdout.strip()}"

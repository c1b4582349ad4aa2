"""Imports go one way: between packages, between their subpackages, and without cycles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Layers from top to bottom: a subpackage may import those below it, none of its own line.
# A name is a folder or a file of the package, or, with a dot, one in such a folder with its own
# layer: `cli` is the rest of the folder.
SUBPACKAGES = {
    "bench": (
        "__main__",
        "commands",
        "report gpu demo",
        "decode experts",
        "peers timeline rank scenarios",
        "checks",
        "heads published",
        "prompts synth",
        "process results options table",
        "train",
    ),
    "specdec": (
        "__main__",
        "cli.entry",
        "cli.app",
        "cli.commands",
        "cli",
        "serve batch training",
        "cluster",
        "__init__",  # names the public API, and imports each name on its first use
        "async_llm",
        "api",
        "dialogue",
        "engine",
        "engine.sequences",
        "analysis",
        "planning.what_if",
        "packing planning",
        "planning.memory",
        "run_options",
        "policy",
        "drafters",
        "devices",
        "metrics sampling traces",
        "models",
        "verification",
        "grammar",
        "text",
        "pair",
        "config",
        "option",
        "checks opening",
    ),
    "backends": (
        "heads cuda shapes",
        "hf llama",
        "llama_states",
        "checkpoint gguf kv",
        "recurrent",
        "attention",
        "feedforward packed",
        "tiles",
        "ggml",
        "timing",
        "contract",
    ),
    "offload": (
        "paging device",
        "experts",
        "ring",
        "placement",
        "storage",
        "formats process",
        "budget",
        "units",
        "distribution errors trace",
    ),
}
PACKAGES = tuple(SUBPACKAGES)  # a package may import itself and the later ones
HEAVY = ("torch", "transformers")
MAX_FILES_IN_A_SUBPACKAGE = 18
MAX_FILES_BESIDE_SUBPACKAGES = 8

# Modules that a run without torch (GGUF) needs, beside all of offload.
TORCH_FREE = (
    "specdec",
    "specdec.api",
    "specdec.cli.app",
    "specdec.config",
    "specdec.analysis.analyze",
    "specdec.engine.speculation",
    "specdec.metrics.stats",
    "specdec.devices.this_machine",
    "specdec.drafters.ngram",
    "specdec.planning.plan",
    "specdec.sampling.sampler",
    "specdec.text.gguf_tokenizer",
    "specdec.verification.acceptance",
    "specdec.verification.block",
    "specdec.verification.tree",
    "backends.llama.source",
    "backends.shapes.gguf",
)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    """Return every module of the four packages, by name."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {module_name(path): path for path in sorted(paths)}


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Return (line, module) of every import, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import out from the package"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in modules() else str(node.module)


@cache
def own_imports() -> dict[str, tuple[tuple[int, str], ...]]:
    """Return, for each of our modules, (line, module) of its imports of our other modules."""
    return {
        name: tuple((line, to) for line, to in imported(path) if to in modules() and to != name)
        for name, path in modules().items()
    }


def reported(name: str, line: int, to: str) -> str:
    return f"{modules()[name].relative_to(ROOT)}:{line} imports {to}"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package: str) -> None:
    above = {*PACKAGES[: PACKAGES.index(package)], "tests"}
    files = [path for name, path in modules().items() if name.split(".")[0] == package]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {to}"
        for path in files
        for line, to in imported(path)
        if to.split(".")[0] in above
    ]
    assert files
    assert not wrong, "\n".join(wrong)


@cache
def levels(package: str) -> dict[str, int]:
    """Return the layer number of each subpackage, from the top."""
    return {
        folder: level for level, line in enumerate(SUBPACKAGES[package]) for folder in line.split()
    }


def subpackage_of(name: str) -> str:
    """Return a module's subpackage: `specdec.cli.notes` -> cli, and with its own layer
    `specdec.cli.commands.run` -> cli.commands."""
    package, *parts = name.split(".")
    nested = ".".join(parts[:2])
    return nested if nested in levels(package) else (parts or ["__init__"])[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_subpackages_import_from_top_to_bottom(package: str) -> None:
    level = levels(package)
    wrong = [
        reported(name, line, to)
        for name, imports in own_imports().items()
        for line, to in imports
        if name.split(".")[0] == to.split(".")[0] == package
        and subpackage_of(name) != subpackage_of(to)
        and level[subpackage_of(to)] <= level[subpackage_of(name)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_subpackage_has_its_place_in_the_order(package: str) -> None:
    named = {*levels(package), "__init__"}
    here = {subpackage_of(name) for name in modules() if name.split(".")[0] == package}
    assert named == here, f"not in the order: {here - named}; not in the package: {named - here}"


def reached(graph: dict[str, set[str]], name: str) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    actual: set[str] = set()
    left = [name]
    while left:
        new = graph[left.pop()] - actual
        actual |= new
        left += new
    return actual


def cycles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Return groups of modules that import each other, directly or indirectly."""
    reach = {name: reached(graph, name) for name in graph}
    return {
        tuple(sorted(to for to in reach[name] if name in reach[to]))
        for name in graph
        if name in reach[name]
    }


def test_cycles_are_found() -> None:
    line = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set[str]()}
    assert not cycles(line)
    assert cycles({**line, "c": {"b", "d"}}) == {("b", "c")}


def test_no_files_import_each_other() -> None:
    graph = {name: {to for _, to in imports} for name, imports in own_imports().items()}
    actual = cycles(graph)
    assert not actual, "\n".join(" <-> ".join(cycle) for cycle in actual)


@pytest.mark.parametrize("package", PACKAGES)
def test_subpackages_are_not_crowded(package: str) -> None:
    sizes = Counter(path.parent for path in modules().values() if path.stem != "__init__")
    beside = sizes.pop(ROOT / package, 0)
    assert beside <= MAX_FILES_BESIDE_SUBPACKAGES, (
        f"{package}/ has {beside} files beside its subpackages"
    )
    crowded = {
        str(folder.relative_to(ROOT)): size
        for folder, size in sizes.items()
        if folder.is_relative_to(ROOT / package) and size > MAX_FILES_IN_A_SUBPACKAGE
    }
    assert not crowded, f"files in a subpackage, of at most {MAX_FILES_IN_A_SUBPACKAGE}: {crowded}"


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_every_package_documents_its_content() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in modules().values()
        if path.stem == "__init__" and not docstring(path).split("\n")[0].endswith((".", ":"))
    ]
    assert not without, f"packages without a summary line: {without}"


def test_offload_names_no_tensor_library() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {to}"
        for name, path in modules().items()
        for line, to in imported(path)
        if name.startswith("offload")
        and to.split(".")[0] in (*HEAVY, "safetensors", "huggingface_hub", "accelerate")
    ]
    assert not wrong, "\n".join(wrong)


def test_what_a_gguf_run_needs_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """One process imports module by module, and names the first that loads either."""
    names = [*TORCH_FREE, *(name for name in modules() if name.split(".")[0] == "offload")]
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from importlib import import_module\n"
        f"for name in {names!r}:\n"
        "    import_module(name)\n"
        f"    heavy = [one for one in {HEAVY!r} if one in sys.modules]\n"
        "    assert not heavy, f'importing {name} loaded {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

"""Run a language model that is larger than its memory budget, with exactly its own output.

    import specdec

    with specdec.load("TARGET", "DRAFT", memory_budget="3.5GiB") as llm:
        print(llm.generate("def fibonacci(n):", max_tokens=64).text)

Names are loaded on first use, so `import specdec` is quick and imports neither torch nor
transformers.
"""

from __future__ import annotations

import os
import sys

__version__ = "0.1.0"

# The command line imports this before it can catch Ctrl-C, so even `typing` would take too long.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

    from offload.errors import SpecdecError as SpecdecError
    from specdec.api import LLM as LLM
    from specdec.api import CompletionOutput as CompletionOutput
    from specdec.api import GenerationResult as GenerationResult
    from specdec.api import StreamChunk as StreamChunk
    from specdec.api import load as load
    from specdec.async_llm import AsyncLLM as AsyncLLM
    from specdec.config import SpecConfig as SpecConfig
    from specdec.metrics.stats import EngineStats as EngineStats
    from specdec.metrics.stats import GenerationStats as GenerationStats
    from specdec.planning.plan import plan_run as plan_run
    from specdec.planning.run_plan import RunPlan as RunPlan
    from specdec.sampling.params import SamplingParams as SamplingParams

# Public name -> the module that defines it.
_PUBLIC = {
    "AsyncLLM": "specdec.async_llm",
    "CompletionOutput": "specdec.api",
    "EngineStats": "specdec.metrics.stats",
    "GenerationResult": "specdec.api",
    "GenerationStats": "specdec.metrics.stats",
    "LLM": "specdec.api",
    "RunPlan": "specdec.planning.run_plan",
    "SamplingParams": "specdec.sampling.params",
    "SpecConfig": "specdec.config",
    "SpecdecError": "offload.errors",
    "StreamChunk": "specdec.api",
    "load": "specdec.api",
    "plan_run": "specdec.planning.plan",
}

__all__ = ["__version__", *_PUBLIC]

# Features for reading weights past the page cache within a budget, that other systems lack.
_MISSING = {
    "darwin": ("macOS", "O_DIRECT, mremap(MREMAP_DONTUNMAP), memory cgroups and /proc"),
    "win32": ("Windows", "preadv, O_DIRECT, mremap, fcntl locks, POSIX signals, cgroups and /proc"),
}
_COMMANDS = {"specdec": "specdec", "specdec-bench": "specdec-bench", "bench": "specdec-bench"}
"""Command names by the script or package that was started."""
_MARK = b'PART_OF = "specdec-stream"'
"""Line in the `__init__.py` of each of our other packages."""


def _check_system(platform: str) -> None:
    """Raise ImportError on an unsupported system, with the features it lacks."""
    if platform != "linux":
        name, missing = _MISSING.get(platform, (platform, "parts of Linux that it is built on"))
        raise ImportError(
            f"specdec needs Linux: {name} has no {missing}; "
            "run it in a Linux virtual machine or container, on x86-64 or arm64"
        )


def check_packages(*names: str, is_on_path: bool = True) -> None:
    """Raise ImportError unless these top-level packages are the ones beside this one.

    Their names are generic: a folder of the same name in the working directory, or another
    distribution, would be imported in their place and fail much later.

    is_on_path: whether this process's path decides what is imported, not the place alone.
    """
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in names:
        problem = _problem_with(name, os.path.join(root, name), is_on_path)
        if problem:
            raise ImportError(
                f"specdec needs its own package `{name}` from {os.path.join(root, name)}, "
                f"but {problem}"
            )


def _problem_with(name: str, folder: str, is_on_path: bool) -> str:
    """Return what is in the place of the package in `folder` and what to do, or ""."""
    if is_on_path:
        spec = _find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec else []
        place = places[0] if places else spec.origin if spec else None
        if not places or os.path.realpath(places[0]) != folder:
            problem = f"{place} is in the way" if place else "it is missing"
            return f"{problem}: rename it, remove it from sys.path, or start from another directory"
    if _is_ours(os.path.join(folder, "__init__.py")):
        return ""
    return (
        "another distribution has written its own package there: install specdec in a virtual "
        "environment of its own"
    )


def _is_ours(path: str) -> bool:
    """Return whether a package's file has our mark."""
    try:
        with open(path, "rb") as file:
            return _MARK in file.read(4096)
    except OSError:
        return False


def _find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a top-level package, without the imports of importlib.util."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _command_name() -> str:
    """Return the name of this process's command, or "" in a program that imports the package."""
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":  # Python has not found the module yet, whose name precedes its arguments
        started = sys.orig_argv[-len(sys.argv)]
    folder, name = os.path.split(started)
    if name == "__main__.py":
        name = os.path.basename(folder)
    return _COMMANDS.get(os.path.splitext(name)[0].removesuffix("-script"), "")


def _check() -> None:
    """Raise ImportError where the package cannot work; a command exits with a one-line error."""
    try:
        _check_system(sys.platform)
        check_packages("offload", "backends")
    except ImportError as error:
        if command := _command_name():
            sys.stderr.write(f"{command}: error: {error}\n")
            raise SystemExit(2) from None
        raise


_check()


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

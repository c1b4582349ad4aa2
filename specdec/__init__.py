"""Run a language model that is larger than the memory it may use, with exactly its own output.

    import specdec

    with specdec.load("TARGET", "DRAFT", memory_budget="3.5GiB") as llm:
        print(llm.generate("def fibonacci(n):", max_tokens=64).text)

Names are loaded on first use, so `import specdec` is quick and imports neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from offload.errors import SpecdecError as SpecdecError
    from specdec.api import LLM as LLM
    from specdec.api import CompletionOutput as CompletionOutput
    from specdec.api import GenerationResult as GenerationResult
    from specdec.api import StreamChunk as StreamChunk
    from specdec.api import load as load
    from specdec.config import SamplingParams as SamplingParams
    from specdec.config import SpecConfig as SpecConfig
    from specdec.planning import plan_run as plan_run
    from specdec.run_plan import RunPlan as RunPlan
    from specdec.stats import GenerationStats as GenerationStats

# Public name -> the module that defines it.
_PUBLIC = {
    "CompletionOutput": "specdec.api",
    "GenerationResult": "specdec.api",
    "GenerationStats": "specdec.stats",
    "LLM": "specdec.api",
    "RunPlan": "specdec.run_plan",
    "SamplingParams": "specdec.config",
    "SpecConfig": "specdec.config",
    "SpecdecError": "offload.errors",
    "StreamChunk": "specdec.api",
    "load": "specdec.api",
    "plan_run": "specdec.planning",
}

__all__ = ["__version__", *_PUBLIC]


def _check_neighbours(root: Path) -> None:
    """Raise ImportError unless `offload` and `backends` are the ones that lie in `root`.

    Their names are generic: a folder of the same name in the working directory, or another
    package, would be imported in their place and fail in a puzzling way much later.
    """
    for name in ("offload", "backends"):
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            found = spec.origin if spec else None
            problem = f"{found} is in the way" if found else "it is missing"
        elif Path(places[0]).resolve() == root / name:
            continue
        else:
            problem = f"{places[0]} is in the way"
        raise ImportError(
            f"specdec needs its own package `{name}` from {root / name}, but {problem}: "
            "rename it, remove it from sys.path, or start from another directory"
        )


_check_neighbours(Path(__file__).resolve().parent.parent)


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

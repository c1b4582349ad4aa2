"""Source of a packed copy, checked by its headers and config.

No library is imported for that, which would take seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.packed.errors import PackError
from offload.formats.checkpoint import WeightIndex, main_format, resolve_within
from offload.formats.safetensors import MAX_HEADER_BYTES, parse_json_object
from specdec.models.opened import is_gguf

_ALONG = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*", "README.md")
_WEIGHT_LISTS = (".safetensors.index.json", ".bin.index.json")
_CONFIG = "config.json"
_EXPERTS = ".experts."
"""Part of the names of a mixture's expert tensors."""
_FULL_FORMATS = {"F16": "fp16", "F32": "fp32"}


def check_source(directory: Path) -> None:
    """Raise SpecdecError if headers and config show that this is no checkpoint in bf16.

    Other problems are found once the model is built.
    """
    if is_gguf(directory):
        raise PackError(f"{directory} is GGUF, which has packed formats of its own (Q4_K_M, Q8_0)")
    index = WeightIndex.from_directory(directory)
    if any(record.scheme for record in index.values()):
        raise PackError(f"{directory} is packed already: use it as it is")
    if any(_EXPERTS in name for name in index):
        raise is_mixture(directory)
    if _config(directory).get("quantization_config"):
        raise is_quantised(directory)
    name = _FULL_FORMATS.get(main_format(index))
    if name is not None:
        raise PackError(
            f"{directory} holds {name} weights, and bf16 alone is packed, in which half of the "
            "bits are exponents of few values: use it as it is, or pack the bf16 checkpoint of "
            "this model if there is one"
        )


def is_mixture(directory: Path) -> PackError:
    return PackError(
        f"{directory} is a mixture of experts, which are read as they are: use it as it is"
    )


def is_quantised(directory: Path) -> PackError:
    return PackError(
        f"{directory} is quantised, in fewer bytes than packing makes: use it as it is"
    )


def files_beside(directory: Path) -> dict[str, Path]:
    """Return the files beside the weights by name: config, tokenizer, licence.

    Links follow the same rule as for weights. Raises SpecdecError.
    """
    result = {}
    for path in sorted({path for pattern in _ALONG for path in directory.glob(pattern)}):
        if path.name.endswith(_WEIGHT_LISTS) or (path.is_dir() and not path.is_symlink()):
            continue
        result[path.name] = resolve_within(directory, path.name)
        if not result[path.name].is_file():
            raise PackError(
                f"{path} leads to {result[path.name]}, which is not a regular file: remove it, or "
                "replace it by a file"
            )
    return result


def _config(directory: Path) -> dict[str, Any]:
    """Read the config. Raises CheckpointError, OSError."""
    path = directory / _CONFIG
    with path.open("rb") as file:
        return parse_json_object(file.read(MAX_HEADER_BYTES), path)

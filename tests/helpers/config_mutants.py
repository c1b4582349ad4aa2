"""Wrong config.json files: those of transformers' families with values deleted, retyped and
exaggerated, at any depth; the same files in every run."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 10**5, 10**6, 10**7, 10**9, 10**12, 2**63, 1e30, -0.5,
    0.5, float("nan"), float("inf"), "", "x", "full_attention", "linear_attention", [], [0],
    [1, 2, 3], ["x"], {}, {"a": 1}, {"rope_type": "yarn"}, [[]], [None] * 3,
    {"full_attention": {"rope_type": "dynamic"}},
)  # fmt: skip
_FACTORS = (2, -1, 1000, 10**6, 0.5)
_DELETED = "deleted"
Path = tuple[str | int, ...]


def defaults(family: str, n_layers: int = 2) -> dict[str, Any]:
    """The default config of a family in transformers, with few layers if possible."""
    kind = CONFIG_MAPPING[family]
    try:
        config = kind()
    except Exception:  # needs the config of another model
        return {"model_type": family}
    if hasattr(config, "num_hidden_layers"):  # otherwise a composite
        try:
            config = kind(num_hidden_layers=n_layers)
        except Exception:  # has values per layer
            config = kind()
    actual: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return actual


def mutant(config: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config with one to three values changed, and the changes by path."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    done: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = [p for p in _paths(changed) if p != ("model_type",)]
        path = rng.choice(paths or [("hidden_size",)])
        parent: Any = changed
        for key in path[:-1]:
            parent = parent[key]
        name = ".".join(map(str, path))
        if rng.random() < 0.15 and isinstance(parent, dict) and path[-1] in parent:
            del parent[path[-1]]
            done[name] = _DELETED
        else:
            parent[path[-1]] = done[name] = _other(parent[path[-1]] if paths else 0, rng)
    return changed, done


def _other(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.4 and type(value) in (int, float):
        return rng.choice([*(value * x for x in _FACTORS), value + 1, str(value), [value]])
    return copy.deepcopy(rng.choice(VALUES))  # a later change may lie inside


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value[:2]))
    for key, item in inner:
        yield (*path, key)
        yield from _paths(item, (*path, key))

"""The recurrent states of a committed prefix as tensors of a file.

states.<layer>.<n> is the state of a layer's n-th recurrence after the snapshot's tokens;
states.<layer>.<n>.fed.<i> is the i-th input of the tokens after it, [tokens, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from backends.contract.backend import BackendError
from backends.contract.sequence import SavedTensors
from backends.recurrent.shapes import PlaceShape, TensorSpec
from backends.recurrent.states import FedToken, Place, RecurrentStates, Snapshot
from offload.formats.mapped import TensorShape

STATES = "states."
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def state_parts(states: RecurrentStates) -> dict[str, list[torch.Tensor]]:
    """Return the tensors to save by name, each as parts that follow each other."""
    parts = {_name(place): [state] for place, state in states.base.states.items()}
    places = states.fed[0].inputs if states.fed else {}
    for place, rows in places.items():
        fed = [item.rows(place) for item in states.fed]
        parts |= {f"{_name(place)}.fed.{i}": [x[i] for x in fed] for i in range(len(rows))}
    return parts


def state_tensors(states: RecurrentStates) -> list[TensorShape]:
    return [
        TensorShape(name, DTYPES[parts[0].dtype], (sum(map(len, parts)), *parts[0].shape[1:]))
        for name, parts in state_parts(states).items()
    ]


def save_states(states: RecurrentStates, buffers: Mapping[str, memoryview]) -> None:
    """Write the tensors into the buffers with their names."""
    for name, parts in state_parts(states).items():
        first = 0
        for part in parts:
            saved = torch.frombuffer(buffers[name][first : first + part.nbytes], dtype=part.dtype)
            saved.view(part.shape).copy_(part)
            first += part.nbytes


def load_states(
    num_tokens: int, tensors: SavedTensors, recurrences: Mapping[Place, PlaceShape]
) -> RecurrentStates:
    """Return the states of a prefix. Raises BackendError for tensors that are not those."""
    n_fed = next((x.shape[0] for name, (x, _) in tensors.items() if ".fed." in name and x.shape), 0)
    if not 0 <= n_fed <= num_tokens:
        raise BackendError(f"the saved states are of {n_fed} tokens, the prefix has {num_tokens}")
    base, inputs = {}, {}
    for place, shape in recurrences.items():
        if n_fed < num_tokens:
            base[place] = _loaded(tensors, _name(place), shape.state)
        if n_fed:
            fed = (TensorSpec((n_fed, *spec.shape), spec.dtype) for spec in shape.fed)
            names = (f"{_name(place)}.fed.{i}" for i in range(len(shape.fed)))
            inputs[place] = tuple(map(_loaded, [tensors] * len(shape.fed), names, fed))
    states = RecurrentStates()
    states.base = states.checkpoint = Snapshot(num_tokens - n_fed, base)
    states.fed = [FedToken(inputs, index) for index in range(n_fed)]
    return states


def refuse_other_states(names: Sequence[str], states: RecurrentStates) -> None:
    """Raise BackendError if a file has states that a prefix does not have."""
    other = set(names) - state_parts(states).keys()
    if other:
        raise BackendError(f"the saved KV has states of another model: {min(other)}")


def _name(place: Place) -> str:
    return f"{STATES}{place[0]}.{place[1]}"


def _loaded(tensors: SavedTensors, name: str, spec: TensorSpec) -> torch.Tensor:
    """Return a copy of a saved tensor."""
    tensor, stored = tensors.get(name, (None, b""))
    is_right = tensor is not None and tensor.dtype == DTYPES[spec.dtype]
    if (
        tensor is None
        or not is_right
        or tuple(tensor.shape) != spec.shape
        or len(stored) != spec.n_bytes
    ):
        raise BackendError(
            f"the saved KV has no {name} of {DTYPES[spec.dtype]} {list(spec.shape)}: remove the "
            "prompt cache file"
        )
    raw = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
    return raw.view(spec.dtype).view(spec.shape)

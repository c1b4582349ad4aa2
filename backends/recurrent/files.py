"""The recurrent states of a committed prefix as tensors of a file.

states.<layer>.<n> is the state of a layer's n-th recurrence after the base snapshot's tokens;
states.<layer>.<n>.fed.<i> is the i-th input of the tokens after it, [tokens, ...]. Those of the
checkpoint begin with states.checkpoint. states.lengths has the tokens of the base, of the
checkpoint, and of the prompt that ends after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from backends.contract.backend import BackendError
from backends.contract.sequence import SavedTensors
from backends.recurrent.kinds import Rows
from backends.recurrent.shapes import PlaceShape, TensorSpec
from backends.recurrent.states import FedToken, Place, RecurrentStates, Snapshot
from offload.formats.mapped import TensorShape

STATES = "states."
_BASE, _CHECKPOINT = STATES, f"{STATES}checkpoint."
_LENGTHS = f"{STATES}lengths"
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
}


def state_parts(states: RecurrentStates) -> dict[str, list[torch.Tensor]]:
    """Return the tensors to save by name, each as parts that follow each other."""
    lengths = (states.base.num_tokens, states.checkpoint.num_tokens, states.end_of_prompt)
    parts = {_LENGTHS: [torch.tensor(lengths, dtype=torch.int32)]}
    parts |= _parts(_BASE, states.base, states.fed)
    if states.checkpoint.num_tokens == states.base.num_tokens:
        return parts | _parts(_CHECKPOINT, Snapshot(), states.tail)
    return parts | _parts(_CHECKPOINT, states.checkpoint, states.tail)


def _parts(
    start: str, snapshot: Snapshot, after: Sequence[FedToken]
) -> dict[str, list[torch.Tensor]]:
    states = snapshot.states if snapshot.num_tokens else {}
    parts = {_name(start, place): [state] for place, state in states.items()}
    for place, rows in (after[0].inputs if after else {}).items():
        fed, name = [item.rows(place) for item in after], _name(start, place)
        parts |= {f"{name}.fed.{i}": [x[i] for x in fed] for i in range(len(rows))}
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
    lengths = _loaded(tensors, _LENGTHS, TensorSpec((3,), torch.int32))
    n_base, n_checkpoint, n_prompt = map(int, lengths)
    if not 0 <= n_checkpoint <= n_base <= num_tokens or not n_checkpoint <= n_prompt <= num_tokens:
        raise BackendError(
            f"the saved states are of {n_base} and {n_checkpoint} tokens and of a prompt of "
            f"{n_prompt}, which are not in a prefix of {num_tokens}"
        )
    states = RecurrentStates()
    states.base = _snapshot(_BASE, n_base, tensors, recurrences)
    states.fed = _fed(_BASE, num_tokens - n_base, tensors, recurrences)
    states.checkpoint = states.base
    if n_checkpoint < n_base:
        states.checkpoint = _snapshot(_CHECKPOINT, n_checkpoint, tensors, recurrences)
    states.tail = _fed(_CHECKPOINT, n_prompt - n_checkpoint, tensors, recurrences)
    return states


def _snapshot(
    start: str, num_tokens: int, tensors: SavedTensors, recurrences: Mapping[Place, PlaceShape]
) -> Snapshot:
    places = recurrences.items() if num_tokens else ()
    states = {place: _loaded(tensors, _name(start, place), shape.state) for place, shape in places}
    return Snapshot(num_tokens, states)


def _fed(
    start: str, n_fed: int, tensors: SavedTensors, recurrences: Mapping[Place, PlaceShape]
) -> list[FedToken]:
    inputs: dict[Place, Rows] = {}
    for place, shape in recurrences.items() if n_fed else ():
        specs = [TensorSpec((n_fed, *spec.shape), spec.dtype) for spec in shape.fed]
        name = _name(start, place)
        inputs[place] = tuple(
            _loaded(tensors, f"{name}.fed.{i}", spec) for i, spec in enumerate(specs)
        )
    return [FedToken(inputs, index) for index in range(n_fed)]


def refuse_other_states(names: Sequence[str], states: RecurrentStates) -> None:
    """Raise BackendError if a file has states that a prefix does not have."""
    other = set(names) - state_parts(states).keys()
    if other:
        raise BackendError(f"the saved KV has states of another model: {min(other)}")


def _name(start: str, place: Place) -> str:
    return f"{start}{place[0]}.{place[1]}"


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

"""Layer placement: the tier of each tensor between its uses, and its memory. Arithmetic only.

    on the device    in a GPU's memory, and computed with there
    resident         in host memory for good: computed with there, or pinned, and copied to the
                     device for each pass
    streamed         on storage: read into a slot of a ring in host memory for each pass

A layer may be spread over all three. A model that the CPU computes has nothing on a device. If a
device computes, the part of a layer outside it arrives in one device slot, laid out as

    [ the host's slot, as it was read | the layer's resident tensors ]

so that it takes two copies at most, and a tensor keeps its file offset modulo ALIGNMENT.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from offload.formats.tensors import TensorRecord
from offload.placement.experts import ExpertCachePlan
from offload.storage.aligned import buffer_bytes
from offload.storage.layout import Layout, make_layout
from offload.units import MIB

DEVICE_GRANULE_BYTES = 2 * MIB
"""Device memory comes in multiples of this (large blocks of torch's caching allocator)."""
N_DEVICE_SLOTS = 2
"""One layer is computed while the next one is copied."""


def device_footprint(n_bytes: int) -> int:
    """Memory of the device that a buffer of `n_bytes` takes."""
    return -(-n_bytes // DEVICE_GRANULE_BYTES) * DEVICE_GRANULE_BYTES


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one decoder layer, and the names of those that do not stream from storage."""

    tensors: tuple[TensorRecord, ...]
    resident: frozenset[str] = frozenset()
    on_device: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = {record.name for record in self.tensors}
        if len(names) != len(self.tensors):
            raise ValueError("a layer names a tensor twice")
        if self.resident & self.on_device:
            raise ValueError(f"{set(self.resident & self.on_device)} cannot be in two tiers")
        for tier, here in (("resident", self.resident), ("on the device", self.on_device)):
            if not here <= names:
                raise ValueError(f"tensors {tier} {set(here - names)} are not in the layer")

    @cached_property
    def streamed(self) -> tuple[TensorRecord, ...]:
        pinned = self.resident | self.on_device
        return tuple(record for record in self.tensors if record.name not in pinned)

    @cached_property
    def resident_records(self) -> tuple[TensorRecord, ...]:
        return tuple(record for record in self.tensors if record.name in self.resident)

    @cached_property
    def device_records(self) -> tuple[TensorRecord, ...]:
        return tuple(record for record in self.tensors if record.name in self.on_device)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.n_bytes for record in self.tensors)

    @cached_property
    def layout(self) -> Layout:
        """Layout of the streamed tensors in a slot."""
        return make_layout(self.streamed)

    @property
    def slot_bytes(self) -> int:
        """Bytes read for this layer, as large as its slot: alignment and small gaps included."""
        return self.layout.n_bytes

    @cached_property
    def resident_layout(self) -> Layout:
        """Layout of the resident tensors in a buffer of the layer's own."""
        return make_layout(self.resident_records, merge_gap=0)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to a device slot per pass."""
        return self.slot_bytes + self.resident_layout.n_bytes

    @cached_property
    def device_slot_offsets(self) -> dict[str, tuple[int, int]]:
        """(offset in the device slot, bytes) of every tensor that is copied, by name."""
        start = self.slot_bytes
        resident = {name: (start + at, n) for name, (at, n) in self.resident_layout.tensors.items()}
        return {**self.layout.tensors, **resident}

    def with_resident(self, names: Iterable[str]) -> LayerWeights:
        """Return the same layer with `names` in host memory."""
        return replace(self, resident=frozenset(names))

    def all_on_device(self) -> LayerWeights:
        return LayerWeights(self.tensors, on_device=frozenset(r.name for r in self.tensors))


@dataclass(frozen=True)
class Placement:
    """All layers of a model, in the order of use. All sizes are bytes of real memory.

    Raises ValueError if layers are to stream without a slot.
    """

    layers: tuple[LayerWeights, ...]
    max_slots: int = 0
    """Depth of the ring in host memory, see `n_slots`."""
    is_on_device: bool = False
    """Whether a device computes; otherwise the CPU does."""
    experts: ExpertCachePlan | None = None
    """Cache of a mixture's routed experts, which are not part of `layers`."""

    def __post_init__(self) -> None:
        if self.n_streamed_layers and self.max_slots < 1:
            raise ValueError(f"{self.n_streamed_layers} layers stream through no slot")

    @cached_property
    def n_streamed_layers(self) -> int:
        """Number of layers that stream from storage, at least in part."""
        return sum(1 for layer in self.layers if layer.slot_bytes)

    @property
    def streams(self) -> bool:
        """Whether a pass on the CPU may have to read from storage."""
        has_all_experts = self.experts is None or self.experts.holds_all
        return self.n_streamed_layers > 0 or not has_all_experts

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from storage per pass, with the expected expert misses of one token."""
        missed = 0 if self.experts is None else int(self.experts.bytes_per_token)
        return sum(layer.slot_bytes for layer in self.layers) + missed

    @property
    def n_moving_layers(self) -> int:
        """Number of layers that are not wholly where they are computed when a pass begins them."""
        if self.is_on_device:
            return sum(1 for layer in self.layers if layer.copied_bytes)
        if self.experts is None or self.experts.holds_all:
            return self.n_streamed_layers
        pairs = zip(self.layers, self.experts.layers, strict=True)
        return sum(1 for layer, experts in pairs if layer.slot_bytes or experts is not None)

    @property
    def moved_bytes(self) -> int:
        """Bytes brought to where they are computed in every pass."""
        if self.is_on_device:
            return sum(layer.copied_bytes for layer in self.layers)
        return self.streamed_bytes

    # --- host memory, which is pinned where there is a device --------------------------------

    @property
    def n_slots(self) -> int:
        """Slots of the ring; 0 when nothing streams."""
        return min(self.max_slots, self.n_streamed_layers)

    @cached_property
    def slot_bytes(self) -> int:
        return max((layer.slot_bytes for layer in self.layers), default=0)

    @property
    def ring_bytes(self) -> int:
        return self.n_slots * buffer_bytes(self.slot_bytes)

    @cached_property
    def resident_bytes(self) -> int:
        if self.is_on_device:  # each layer has a buffer, which is copied as a whole
            return sum(buffer_bytes(layer.resident_layout.n_bytes) for layer in self.layers)
        return buffer_bytes(_layout_of(layer.resident_records for layer in self.layers).n_bytes)

    @property
    def host_bytes(self) -> int:
        """Memory of the resident tensors, the ring and the expert cache."""
        return self.resident_bytes + self.ring_bytes + self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Memory of the expert cache."""
        return 0 if self.experts is None else self.experts.n_bytes

    # --- the device's memory -----------------------------------------------------------------

    @property
    def n_device_slots(self) -> int:
        return min(N_DEVICE_SLOTS, self.n_moving_layers) if self.is_on_device else 0

    @property
    def device_slot_bytes(self) -> int:
        return max((layer.copied_bytes for layer in self.layers), default=0)

    @property
    def device_ring_bytes(self) -> int:
        return self.n_device_slots * device_footprint(self.device_slot_bytes)

    @cached_property
    def device_layout(self) -> Layout:
        """Layout of the tensors that stay on the device in their one buffer."""
        return _layout_of(layer.device_records for layer in self.layers)

    @property
    def device_resident_bytes(self) -> int:
        return device_footprint(self.device_layout.n_bytes)

    @property
    def device_bytes(self) -> int:
        """Memory of the tensors that stay on the device and of the slots."""
        return self.device_resident_bytes + self.device_ring_bytes


def _layout_of(groups: Iterable[tuple[TensorRecord, ...]]) -> Layout:
    """Return the layout in one buffer; a tensor that several layers share is there once."""
    records = {record.name: record for group in groups for record in group}
    return make_layout(records.values(), merge_gap=0)

"""Where each tensor of each layer lives between its uses: device, pinned host memory, storage.

    on the device    computed with where it is
    in the host      copied to a device slot for each pass, from memory that is pinned for good
    in storage       read into a pinned slot, and copied from there to a device slot

A layer may be spread over all three. What lies outside the device arrives in one device slot, laid
out as

    [ the pinned slot, as it was read | the layer's pinned tensors ]

so that it takes two copies at most, and a tensor keeps its file offset modulo ALIGNMENT.
This page has figures only; who decides what goes where is a planner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from offload.formats.tensors import TensorRecord
from offload.residency.plan import LayerWeights
from offload.storage.aligned import buffer_bytes
from offload.storage.layout import Layout, make_layout
from offload.units import MIB

DEVICE_GRANULE_BYTES = 2 * MIB
"""Device memory comes in multiples of this (large blocks of torch's caching allocator)."""
CUDA_CONTEXT_BYTES = 512 * MIB
"""Of VRAM, beside what torch allocates: the driver's context and the loaded kernels. Assumed."""
DEFAULT_N_DEVICE_SLOTS = 2


def device_footprint(n_bytes: int) -> int:
    """Memory of the device that a buffer of `n_bytes` takes."""
    return -(-n_bytes // DEVICE_GRANULE_BYTES) * DEVICE_GRANULE_BYTES


@dataclass(frozen=True)
class TieredLayer:
    """The tensors of one decoder layer, and the names of those that stay on the device or pinned.

    All other tensors stream from storage.
    """

    tensors: tuple[TensorRecord, ...]
    on_device: frozenset[str] = frozenset()
    in_host: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.on_device & self.in_host:
            raise ValueError(f"{set(self.on_device & self.in_host)} cannot be in two tiers")
        unknown = self.on_device - {record.name for record in self.tensors}
        if unknown:
            raise ValueError(f"tensors on the device {set(unknown)} are not in the layer")
        _ = self.host  # which checks the rest

    @cached_property
    def host(self) -> LayerWeights:
        """The part that goes through host memory: resident (pinned) there, or streamed."""
        elsewhere = tuple(r for r in self.tensors if r.name not in self.on_device)
        return LayerWeights(elsewhere, self.in_host)

    @cached_property
    def device_records(self) -> tuple[TensorRecord, ...]:
        return tuple(r for r in self.tensors if r.name in self.on_device)

    @cached_property
    def pinned_layout(self) -> Layout:
        """Where the host's resident tensors of this layer lie in their pinned buffer."""
        return make_layout(self.host.resident_records, merge_gap=0)

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from storage per pass, and of a pinned slot."""
        return self.host.slot_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to the device per pass, and of a device slot."""
        return self.streamed_bytes + self.pinned_layout.n_bytes

    @cached_property
    def slot_offsets(self) -> dict[str, tuple[int, int]]:
        """name -> (offset in the device slot, bytes) of every tensor that is copied."""
        start = self.streamed_bytes
        pinned = {name: (start + at, n) for name, (at, n) in self.pinned_layout.tensors.items()}
        return {**self.host.layout.tensors, **pinned}


@dataclass(frozen=True)
class TierPlan:
    """All layers of a model over the three tiers. Figures are bytes of real memory.

    Raises ValueError where layers are to be copied or streamed without a slot for it.
    """

    layers: tuple[TieredLayer, ...]
    n_device_slots: int = DEFAULT_N_DEVICE_SLOTS
    """At most; never more than layers that are copied, see `used_device_slots`."""
    n_pinned_slots: int = 0
    """At most; never more than layers that stream."""

    def __post_init__(self) -> None:
        if self.n_copied_layers and self.n_device_slots < 1:
            raise ValueError(f"{self.n_copied_layers} layers are copied through no device slot")
        if self.n_streamed_layers and self.n_pinned_slots < 1:
            raise ValueError(f"{self.n_streamed_layers} layers stream through no pinned slot")

    @property
    def n_copied_layers(self) -> int:
        """Layers that are not wholly on the device."""
        return sum(1 for layer in self.layers if layer.copied_bytes)

    @property
    def n_streamed_layers(self) -> int:
        """Layers of which something streams from storage."""
        return sum(1 for layer in self.layers if layer.streamed_bytes)

    @property
    def used_device_slots(self) -> int:
        return min(self.n_device_slots, self.n_copied_layers)

    @property
    def used_pinned_slots(self) -> int:
        return min(self.n_pinned_slots, self.n_streamed_layers)

    @cached_property
    def device_layout(self) -> Layout:
        """Where the tensors that stay on the device lie in their one buffer."""
        return make_layout(_unique(layer.device_records for layer in self.layers), merge_gap=0)

    @property
    def device_resident_bytes(self) -> int:
        return device_footprint(self.device_layout.n_bytes)

    @property
    def device_slot_bytes(self) -> int:
        return max((layer.copied_bytes for layer in self.layers), default=0)

    @property
    def device_ring_bytes(self) -> int:
        return self.used_device_slots * device_footprint(self.device_slot_bytes)

    @property
    def device_bytes(self) -> int:
        """Device memory of the layers: resident, and slots."""
        return self.device_resident_bytes + self.device_ring_bytes

    @property
    def pinned_resident_bytes(self) -> int:
        return sum(buffer_bytes(layer.pinned_layout.n_bytes) for layer in self.layers)

    @property
    def pinned_slot_bytes(self) -> int:
        return max((layer.streamed_bytes for layer in self.layers), default=0)

    @property
    def pinned_ring_bytes(self) -> int:
        return self.used_pinned_slots * buffer_bytes(self.pinned_slot_bytes)

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of the layers: resident, and slots."""
        return self.pinned_resident_bytes + self.pinned_ring_bytes

    @property
    def copied_bytes(self) -> int:
        """Copied to the device per pass."""
        return sum(layer.copied_bytes for layer in self.layers)

    @property
    def streamed_bytes(self) -> int:
        """Read from storage per pass."""
        return sum(layer.streamed_bytes for layer in self.layers)


def _unique(groups: Iterable[tuple[TensorRecord, ...]]) -> list[TensorRecord]:
    """A tensor that several layers share is there once."""
    return list({record.name: record for group in groups for record in group}.values())

"""Weights over three tiers, and passes over them on the fake device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fake_device import FakeDevice, Policy
from weight_files import Weights

from offload.device.streamer import DeviceStreamer
from offload.placement.placement import LayerWeights, Placement
from offload.placement.tiers import fill_device, fill_host
from offload.storage.aligned import ALIGNMENT

DEVICE, HOST, STORAGE = "device", "host", "storage"
POLICIES = [(copies, computations) for copies in Policy for computations in Policy]
TierOf = Callable[[int, int], str]
"""(layer, tensor) -> tier"""


def plan_tiers(
    layers: Sequence[LayerWeights],
    host_bytes: int,
    device_bytes: int,
    *,
    n_slots: int | None = None,
) -> Placement:
    """Fill the device's memory, then the host's."""
    return fill_host(fill_device(layers, device_bytes), host_bytes, n_slots=n_slots)


def tiered(weights: Weights, tier_of: TierOf, n_slots: int = 2) -> Placement:
    layers = []
    for i, layer in enumerate(weights.layers):
        names = {DEVICE: set(), HOST: set(), STORAGE: set()}
        for j, record in enumerate(layer.tensors):
            names[tier_of(i, j)].add(record.name)
        layers.append(LayerWeights(layer.tensors, frozenset(names[HOST]), frozenset(names[DEVICE])))
    return Placement(tuple(layers), n_slots, is_on_device=True)


@contextmanager
def streaming(plan: Placement, device: FakeDevice, **options) -> Iterator[DeviceStreamer]:
    """Open a streamer with small reads, which must free all memory at the end."""
    streamer = DeviceStreamer(plan, device, **{"read_bytes": ALIGNMENT, "n_readers": 2, **options})
    try:
        yield streamer
    finally:
        streamer.close()
        assert (device.n_allocated, device.n_pinned) == (0, 0)


def run_passes(
    streamer: DeviceStreamer,
    device: FakeDevice,
    weights: Weights,
    n_passes: int = 1,
    *,
    stop_before: int = -1,
    seconds: float = 1.0,
) -> None:
    """Let the device check all layers of some passes, each of which ends with its results.

    The last pass is left before layer `stop_before`, with all that is enqueued left to run.
    """
    for number in range(n_passes):
        for index in range(len(weights.layers)):
            if index == stop_before and number == n_passes - 1:
                return
            with streamer.layer(index) as tensors:
                device.compute(partial(weights.check, index, tensors), seconds)
        device.synchronize()


def tiered_model(model, tier_of: Callable[[int, int], str], n_slots=2):
    """Return the tiered plan of a model's layers."""
    return tiered(Weights(model.layer_weights, {}), tier_of, n_slots)

"""Device profiles behind `--on`, for `specdec plan` and `specdec analyze`.

A device is named (PRESETS), read from a JSON file as `specdec profile --json` prints it, or is this
machine, measured. A preset of a storage alone, or a profile without arithmetic, is completed with
measurements of this machine, and the result names those.

Units: bytes, bytes per second, FLOP/s (a multiplication and an addition are two). Number formats
have the names that weight files use: "BF16", "F16", "F32", "Q4_0", "Q6_K"; "default" stands for
all that are not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Protocol

from backends.contract.curve import ComputeCurve
from offload.errors import SpecdecError
from offload.formats.tensors import TensorRecord
from offload.units import GIB

DEFAULT_FORMAT = "default"


class DeviceError(SpecdecError, ValueError):
    """An unknown device, or a profile with invalid values."""


@dataclass(frozen=True)
class DeviceMeasurements:
    """Known values of a device; None where unknown.

    A GPU has `vram_bytes` and `pcie_bytes_per_second`; its `dram_bytes_per_second` is that of its
    own memory, which its arithmetic reads from, and `memory_bytes` is the host's.
    """

    name: str
    storage_bytes_per_second: float | None = None
    dram_bytes_per_second: float | None = None
    flops_per_second: Mapping[str, float] | None = None
    memory_bytes: int | None = None
    pcie_bytes_per_second: float | None = None
    vram_bytes: int | None = None


@dataclass(frozen=True)
class DeviceSpec:
    """A device with all values known."""

    name: str
    storage_bytes_per_second: float
    dram_bytes_per_second: float
    """Bandwidth of the memory that the arithmetic reads from: a GPU's own where there is one."""
    flops_per_second: Mapping[str, float]
    """FLOP/s by number format of the weights."""
    memory_bytes: int
    """Host memory, including what the system and the interpreter take."""
    pcie_bytes_per_second: float | None = None
    """Bandwidth between host and GPU; None without a GPU."""
    vram_bytes: int = 0
    from_this_machine: tuple[str, ...] = ()
    """Names of the values that were measured on this machine."""

    def flops(self, number_format: str) -> float:
        """Return FLOP/s with weights of that format. Raises DeviceError where it is unknown."""
        known = self.flops_per_second
        if number_format in known:
            return known[number_format]
        if DEFAULT_FORMAT in known:
            return known[DEFAULT_FORMAT]
        raise DeviceError(
            f"device {self.name} has no FLOP/s for {number_format}, only for "
            f"{', '.join(sorted(known))}: add it or {DEFAULT_FORMAT!r} to its flops_per_second"
        )

    def compute_curve(self, matrices: Iterable[TensorRecord]) -> ComputeCurve:
        """Return the arithmetic of a pass that multiplies with these weights, all in memory.

        One token takes as long as reading the weights or as multiplying, whichever is longer; each
        further token as long as multiplying.
        """
        n_bytes, per_token = 0, 0.0
        for record in matrices:
            n_bytes += record.n_bytes
            n_weights = 1
            for size in record.shape:
                n_weights *= size
            per_token += 2 * n_weights / self.flops(record.dtype)
        one_token = max(n_bytes / self.dram_bytes_per_second, per_token)
        return ComputeCurve.linear(one_token - per_token, per_token)

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["flops_per_second"] = dict(self.flops_per_second)
        values["from_this_machine"] = list(self.from_this_machine)
        return values


class Machine(Protocol):
    """Protocol of this machine; each value is measured at its first access."""

    @property
    def storage_bytes_per_second(self) -> float: ...

    @property
    def dram_bytes_per_second(self) -> float: ...

    @property
    def flops_per_second(self) -> Mapping[str, float]: ...

    @property
    def memory_bytes(self) -> int: ...


THIS_MACHINE = "this machine"
_COMPLETED = (
    "storage_bytes_per_second",
    "dram_bytes_per_second",
    "flops_per_second",
    "memory_bytes",
)


def complete(measurements: DeviceMeasurements, machine: Machine) -> DeviceSpec:
    """Complete unknown values with measurements of this machine; measure only those."""
    known = {name: getattr(measurements, name) for name in _COMPLETED}
    missing = tuple(name for name, value in known.items() if value is None)
    known.update({name: getattr(machine, name) for name in missing})
    return DeviceSpec(
        name=measurements.name,
        **known,
        pcie_bytes_per_second=measurements.pcie_bytes_per_second,
        vram_bytes=measurements.vram_bytes or 0,
        from_this_machine=() if measurements.name == THIS_MACHINE else missing,
    )


def this_machine() -> DeviceMeasurements:
    """Return a profile without values, so that all of them will be measured."""
    return DeviceMeasurements(THIS_MACHINE)


# --- presets --------------------------------------------------------------------------------------
# Bus limits are after line coding. Where a data sheet gives a peak, the value here is the share of
# it that large sequential work is assumed to reach, and the comment says so. Values are rounded:
# they answer "which tier binds", and `specdec profile --json` on the device is more accurate.

_GB = 10**9
_TERA = 10**12
_GIGA = 10**9


def _storage(name: str, bytes_per_second: float) -> DeviceMeasurements:
    return DeviceMeasurements(name, storage_bytes_per_second=bytes_per_second)


_NVME_GEN3 = 3.0 * _GB  # PCIe 3.0 x4 carries 3.94 GB/s; drives read 3.0 to 3.5
_NVME_GEN4 = 6.5 * _GB  # PCIe 4.0 x4 carries 7.88 GB/s; drives read 5 to 7

_STORAGES = (
    # UHS-I at SDR104 carries 104 MB/s (SD specification 3.01); cards read about 90.
    _storage("sd-card", 90e6),
    # A 7200/min disk reads 100 (inner tracks) to 250 MB/s (outer ones).
    _storage("hdd", 150e6),
    # HS400 carries 400 MB/s (JEDEC JESD84-B51); phones and boards read about 280.
    _storage("emmc-5.1", 280e6),
    # SATA at 6 Gbit/s carries 600 MB/s; drives read 500 to 560.
    _storage("sata-ssd", 500e6),
    # USB 3.2 Gen 2 carries 1.21 GB/s; SSDs behind a bridge read about 0.9.
    _storage("usb-ssd", 0.9 * _GB),
    # Two lanes of HS-G4 carry 2.9 GB/s (JEDEC JESD220E); phones read 1.5 to 2.1.
    _storage("ufs-3.1", 1.5 * _GB),
    # Two lanes of HS-G5 carry 5.8 GB/s (JEDEC JESD220F); makers say 4.2, assumed 3.5.
    _storage("ufs-4.0", 3.5 * _GB),
    _storage("nvme-gen3", _NVME_GEN3),
    _storage("nvme-gen4", _NVME_GEN4),
    # PCIe 5.0 x4 carries 15.75 GB/s; drives read 10 to 14.
    _storage("nvme-gen5", 12.0 * _GB),
)

_DEVICES = (
    # Raspberry Pi 5, 8 GB. Four Cortex-A76 at 2.4 GHz: two 128-bit multiply-adds a cycle are 154
    # GFLOP/s in F32, assumed 50 % of it; quantised weights by dot-product instructions, assumed
    # twice as fast. LPDDR4X-4267 on 32 bits: 17 GB/s, assumed 60 %. Boots from an SD card.
    DeviceMeasurements(
        "raspberry-pi-5",
        storage_bytes_per_second=90e6,
        dram_bytes_per_second=10 * _GB,
        flops_per_second={DEFAULT_FORMAT: 150 * _GIGA, "F32": 75 * _GIGA, "BF16": 75 * _GIGA},
        memory_bytes=8 * GIB,
    ),
    # A phone of 2020 to 2022 with 8 GB: LPDDR5 on 64 bits, 44 to 51 GB/s, assumed 60 % for the CPU;
    # one large and three middle cores, assumed 300 GFLOP/s with 8-bit dot products, half in F16.
    DeviceMeasurements(
        "phone",
        storage_bytes_per_second=1.5 * _GB,
        dram_bytes_per_second=28 * _GB,
        flops_per_second={
            DEFAULT_FORMAT: 300 * _GIGA,
            "F16": 150 * _GIGA,
            "BF16": 150 * _GIGA,
            "F32": 75 * _GIGA,
        },
        memory_bytes=8 * GIB,
    ),
    # A laptop with DDR4-3200 on 128 bits (51 GB/s, assumed 75 %) and eight AVX2 cores at 3 GHz (768
    # GFLOP/s peak in F32, assumed 50 %, the same for the other formats).
    DeviceMeasurements(
        "laptop",
        storage_bytes_per_second=_NVME_GEN3,
        dram_bytes_per_second=38 * _GB,
        flops_per_second={DEFAULT_FORMAT: 380 * _GIGA},
        memory_bytes=16 * GIB,
    ),
    # A laptop with DDR5-5600 on 128 bits (90 GB/s, assumed 75 %) and eight AVX2 cores at 4 GHz
    # (1024 GFLOP/s peak in F32, assumed 50 %, the same for the other formats).
    DeviceMeasurements(
        "laptop-ddr5",
        storage_bytes_per_second=_NVME_GEN4,
        dram_bytes_per_second=67 * _GB,
        flops_per_second={DEFAULT_FORMAT: 510 * _GIGA},
        memory_bytes=32 * GIB,
    ),
    # An 8 GB graphics card, after the GeForce RTX 4060 (NVIDIA Ada whitepaper: 272 GB/s; 30 TFLOP/s
    # dense in F16 with F32 sums; PCIe 4.0 x8, 15.8 GB/s), assumed 85 %, 60 % and 80 % of those; F32
    # 15 TFLOP/s, 60 %. Quantised weights are expanded to F16. The host has 16 GB and an NVMe drive.
    DeviceMeasurements(
        "gpu-8gb",
        storage_bytes_per_second=_NVME_GEN3,
        dram_bytes_per_second=230 * _GB,
        flops_per_second={DEFAULT_FORMAT: 18 * _TERA, "F32": 9 * _TERA},
        memory_bytes=16 * GIB,
        pcie_bytes_per_second=12.5 * _GB,
        vram_bytes=8 * GIB,
    ),
    # A 24 GB graphics card, after the GeForce RTX 4090 (same whitepaper: 1008 GB/s; 165 TFLOP/s
    # dense in F16 with F32 sums; PCIe 4.0 x16, 31.5 GB/s), the same shares. The host has 64 GB.
    DeviceMeasurements(
        "gpu-24gb",
        storage_bytes_per_second=_NVME_GEN4,
        dram_bytes_per_second=860 * _GB,
        flops_per_second={DEFAULT_FORMAT: 100 * _TERA, "F32": 50 * _TERA},
        memory_bytes=64 * GIB,
        pcie_bytes_per_second=25 * _GB,
        vram_bytes=24 * GIB,
    ),
)

PRESETS: Mapping[str, DeviceMeasurements] = MappingProxyType(
    {spec.name: spec for spec in (*_STORAGES, *_DEVICES)}
)
"""Presets by name: storages (other values are this machine's), then whole devices."""


def with_memory(device: DeviceSpec, memory_bytes: int) -> DeviceSpec:
    """Return the device with another amount of host memory to use."""
    return replace(device, memory_bytes=memory_bytes)

"""`--on NAME|PROFILE.json`: presets by name, and files as `specdec profile --json` prints them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.units import UnitError, parse_bytes
from specdec.devices.spec import PRESETS, DeviceError, DeviceMeasurements
from specdec.opening import open_now

_MAX_FILE_BYTES = 2**20
_SPEEDS = ("storage_bytes_per_second", "dram_bytes_per_second", "pcie_bytes_per_second")
_SIZES = ("memory_bytes", "vram_bytes")
_NUMBERS = ("name", *_SPEEDS, "flops_per_second", *_SIZES)
_IGNORED = ("read_bytes", "n_readers", "direct", "measured_at", "device")
"""Keys of `specdec profile --json` about how it measured; they are accepted and ignored."""
_MAX = 1e18  # of any value: far above every device, far below an overflow


def find_device(name: str) -> DeviceMeasurements:
    """Return the preset of that name, or the profile in that file.

    Raises DeviceError for an unknown name, or a file that cannot be read or has invalid values.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name).expanduser()
    if path.suffix != ".json" and not path.is_file():
        raise DeviceError(
            f"no device {name!r}: name one of {', '.join(PRESETS)}, "
            "or a JSON file that `specdec profile --json` wrote"
        )
    return read_device_file(path)


def read_device_file(path: Path) -> DeviceMeasurements:
    """Read and check a profile; the file's name is used where it has none."""
    try:
        with open_now(path) as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DeviceError(f"cannot read {path}: {error.strerror or error}") from error
    if len(text) > _MAX_FILE_BYTES:
        raise DeviceError(f"{path} is larger than {_MAX_FILE_BYTES} bytes: no device profile")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DeviceError(f"{path} is no JSON: write `specdec profile --json` there") from error
    if not isinstance(values, dict):
        raise DeviceError(f"{path} holds no JSON object: write `specdec profile --json` there")
    return _checked(values, path)


def _checked(values: dict[str, Any], path: Path) -> DeviceMeasurements:
    unknown = sorted(set(values) - {*_NUMBERS, *_IGNORED})
    if unknown:
        raise DeviceError(
            f"{path} has an unknown value {unknown[0][:60]!r}: known are {', '.join(_NUMBERS)}"
        )
    given = {key: value for key, value in values.items() if key in _NUMBERS and value is not None}
    name = given.pop("name", path.stem)
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 60:
        raise DeviceError(f"{path}: the name must be a short string")
    if not given:
        raise DeviceError(f"{path} has no value of a device: give {', '.join(_NUMBERS[1:])}")
    if ("vram_bytes" in given) != ("pcie_bytes_per_second" in given):
        raise DeviceError(f"{path}: a GPU needs both vram_bytes and pcie_bytes_per_second")
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key == "flops_per_second":
            checked[key] = _flops(value, path)
        else:
            checked[key] = _size(value, key, path) if key in _SIZES else _speed(value, key, path)
    return DeviceMeasurements(name, **checked)


def _speed(value: Any, key: str, path: Path) -> float:
    if type(value) not in (int, float) or not 0 < value <= _MAX:
        raise DeviceError(f"{path}: {key} is {_shown(value)}, must be a number above 0")
    return float(value)


def _size(value: Any, key: str, path: Path) -> int:
    try:
        n_bytes = parse_bytes(value)
    except UnitError as error:
        raise DeviceError(f"{path}: {key} is {_shown(value)}: {error}") from error
    if not 0 < n_bytes <= _MAX:
        raise DeviceError(f"{path}: {key} is {_shown(value)}, must be above 0")
    return n_bytes


def _flops(value: Any, path: Path) -> Mapping[str, float]:
    if not isinstance(value, dict) or not value:
        raise DeviceError(
            f"{path}: flops_per_second is {_shown(value)}, must be an object of number formats, "
            'as in {"BF16": 5e11, "default": 2e11}'
        )
    return {
        name: _speed(speed, f"flops_per_second of {name[:20]}", path)
        for name, speed in value.items()
    }


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]

"""Devices: presets, profiles from files, and values measured on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_pair import save_model

from backends.timing.measure import matrix_formats
from offload.formats.tensors import TensorRecord
from specdec.cli.app import main
from specdec.devices.file import find_device
from specdec.devices.spec import PRESETS, DeviceError, DeviceSpec, complete, this_machine
from specdec.devices.this_machine import ThisMachine

WHOLE = {
    "storage_bytes_per_second": 1e9,
    "dram_bytes_per_second": 2e10,
    "flops_per_second": {"BF16": 4e11, "default": 1e11},
    "memory_bytes": "8GB",
}


class Machine:
    """Known measurements, with a record of those requested."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _figure(self, name: str, value: Any) -> Any:
        self.asked.append(name)
        return value

    @property
    def storage_bytes_per_second(self) -> float:
        return float(self._figure("storage_bytes_per_second", 7e8))

    @property
    def dram_bytes_per_second(self) -> float:
        return float(self._figure("dram_bytes_per_second", 9e9))

    @property
    def flops_per_second(self) -> Mapping[str, float]:
        return {"BF16": self._figure("flops_per_second", 3e11)}

    @property
    def memory_bytes(self) -> int:
        return int(self._figure("memory_bytes", 5 * 10**9))


def write(tmp_path: Path, value: object) -> str:
    path = tmp_path / "board.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_a_whole_device_asks_nothing_of_this_machine(tmp_path: Path) -> None:
    machine = Machine()
    device = complete(find_device(write(tmp_path, WHOLE)), machine)
    assert machine.asked == []
    assert device == DeviceSpec("board", 1e9, 2e10, {"BF16": 4e11, "default": 1e11}, 8 * 10**9)


def test_a_storage_takes_the_rest_from_this_machine() -> None:
    machine = Machine()
    device = complete(find_device("sata-ssd"), machine)
    assert device.storage_bytes_per_second == 500e6
    assert device.dram_bytes_per_second == 9e9
    assert device.from_this_machine == tuple(machine.asked)
    assert machine.asked == ["dram_bytes_per_second", "flops_per_second", "memory_bytes"]


def test_this_machine_is_measured_whole() -> None:
    device = complete(this_machine(), Machine())
    assert device == DeviceSpec("this machine", 7e8, 9e9, {"BF16": 3e11}, 5 * 10**9)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete_or_storages(name: str) -> None:
    machine = Machine()
    device = complete(PRESETS[name], machine)
    assert "storage_bytes_per_second" not in machine.asked
    assert len(machine.asked) in (0, 3)
    assert (device.pcie_bytes_per_second is not None) == (device.vram_bytes > 0)
    if not machine.asked:  # each tier is faster than the one below
        assert device.storage_bytes_per_second < device.dram_bytes_per_second
        assert device.flops("Q4_K") > device.dram_bytes_per_second


def test_flops_by_format() -> None:
    device = complete(this_machine(), Machine())
    assert device.flops("BF16") == 3e11
    with pytest.raises(DeviceError, match="no FLOP/s for Q4_0, only for BF16"):
        device.flops("Q4_0")
    assert replace(device, flops_per_second={"default": 5.0}).flops("Q4_0") == 5.0


def test_a_pass_is_bound_by_memory_first_and_by_arithmetic_then() -> None:
    device = DeviceSpec("d", 1.0, 100.0, {"BF16": 1000.0}, 1)
    record = TensorRecord("w", "BF16", (10, 50), Path("x"), 0, 1000)
    compute = device.compute_curve([record, record])
    assert compute.seconds(1) == pytest.approx(20.0)  # 2000 B
    assert compute.seconds_per_token == pytest.approx(2.0)  # 2 x 500 x 2 FLOP at 1000 FLOP/s
    busy = replace(device, flops_per_second={"BF16": 10.0}).compute_curve([record])
    assert busy.seconds(7) == pytest.approx(700.0)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ({}, "no value"),
        ({**WHOLE, "storage_bytes_per_second": 0}, "above 0"),
        ({**WHOLE, "storage_bytes_per_second": True}, "above 0"),
        ({**WHOLE, "storage_bytes_per_second": "fast"}, "above 0"),
        ('{"storage_bytes_per_second": Infinity}', "above 0"),
        ('{"storage_bytes_per_second": NaN}', "above 0"),
        ({**WHOLE, "storage_bytes_per_second": 10**400}, "above 0"),  # too large for any float
        ({**WHOLE, "dram_bytes_per_second": -1}, "dram_bytes_per_second is -1"),
        ({**WHOLE, "memory_bytes": 0}, "memory_bytes is 0"),
        ({**WHOLE, "memory_bytes": 2.5}, "memory_bytes is 2.5"),
        ({**WHOLE, "memory_bytes": "8 apples"}, "8 apples"),
        ({**WHOLE, "flops_per_second": {}}, "object of number formats"),
        ({**WHOLE, "flops_per_second": 5}, "object of number formats"),
        ({**WHOLE, "flops_per_second": {"BF16": 0}}, "flops_per_second of BF16"),
        ({**WHOLE, "storage_speed": 5}, "unknown value 'storage_speed'"),
        ({**WHOLE, "vram_bytes": 5}, "both vram_bytes and pcie"),
        ({**WHOLE, "name": ""}, "name must be"),
        ({**WHOLE, "name": "a\nb"}, "name must be"),
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path: Path, value: object, part: str) -> None:
    path = write(tmp_path, value)
    with pytest.raises(DeviceError) as caught:
        find_device(path)
    message = str(caught.value)
    assert part in message
    assert path in message
    assert "\n" not in message


@given(at=st.integers(0, 200), n_replaced=st.integers(0, 30), data=st.binary(max_size=12))
def test_changed_bytes_are_a_device_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, at: int, n_replaced: int, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.json"
    content = json.dumps(WHOLE).encode()
    path.write_bytes(content[:at] + data + content[at + n_replaced :])
    try:
        device = complete(find_device(str(path)), Machine())
        said = ""
    except DeviceError as error:
        said = str(error)
    assert "\n" not in said
    assert said or device.storage_bytes_per_second > 0


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no device 'floppy': name one of .*ufs-3\.1"):
        find_device("floppy")
    with pytest.raises(DeviceError, match="cannot read"):
        find_device(str(tmp_path / "missing.json"))


def test_what_profile_prints_is_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", seed=1)
    assert main(["profile", "-m", str(model), "--json"]) == 0
    printed = capsys.readouterr().out
    machine = Machine()
    device = complete(find_device(write(tmp_path, printed)), machine)
    assert machine.asked == []
    profile = json.loads(printed)
    assert device.storage_bytes_per_second == profile["storage_bytes_per_second"]
    assert device.flops("F32") == profile["flops_per_second"]["F32"] > 0
    assert main(["profile", "-m", str(model)]) == 0
    assert "GFLOP/s in F32" in capsys.readouterr().out


def test_traces_of_a_format_are_not_measured() -> None:
    def record(dtype: str, *shape: int, n_bytes: int) -> TensorRecord:
        return TensorRecord("w", dtype, shape, Path("x"), 0, n_bytes)

    records = [
        record("Q6_K", 8, 8, n_bytes=300),
        record("Q4_K", 8, 8, n_bytes=700),
        record("F16", 8, 8, n_bytes=5),
        record("F32", 4000, n_bytes=16000),  # a vector
    ]
    assert matrix_formats(records) == ("Q4_K", "Q6_K")


def test_a_format_that_cannot_be_timed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="F8_E4M3 cannot be timed"):
        _ = ThisMachine(tmp_path, ("F8_E4M3",)).flops_per_second

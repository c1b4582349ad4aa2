"""The parts of a mapping that the pager changes or leaves alone, and calls after closing."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mapped_weights import HUGE, mapped, needs_whole_pages
from mapped_weights import memory_in as bytes_in
from paging import PAGE, check_memory, one_file
from weight_files import Weights, write_weights

from offload.formats.tensors import TensorRecord
from offload.paging.address_space import AddressSpaceError, MappedRange
from offload.paging.pager import Pager
from offload.paging.plan import paging_overhead_bytes, plan_paging
from offload.placement.placement import LayerWeights

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_neighbours_share_pages_with_what_stays(tmp_path: Path) -> None:
    path = tmp_path / "f"
    records, content = one_file(path, [10_000, 5_000, 30_000, 100, 40_000, 9_000, 7_777], 123)
    head, norm, a, small, b, tail, last = records
    weights = Weights((LayerWeights((a, small), frozenset({"t3"})), LayerWeights((b, last))), {})
    with mapped(weights) as files:
        address, size = files.ranges[path]
        with Pager(
            files.layers, [norm], files.mappings, 2, untouched=[head, tail], poison=True
        ) as pager:
            for index in (0, 1, 0, 1):
                with pager.layer(index):
                    for record in files.layers[index].tensors:
                        start = record.offset
                        actual = ctypes.string_at(address + start, record.n_bytes)
                        assert actual == content[start : start + record.n_bytes]
                for record in (head, norm, small, tail):  # always there
                    start = record.offset
                    actual = ctypes.string_at(address + start, record.n_bytes)
                    assert actual == content[start : start + record.n_bytes]
            assert ctypes.string_at(address + len(content), size - len(content)).count(0) == (
                size - len(content)
            )
            # Pages with nothing but `head` and `tail` are still the file's.
            backed = bytes_in([(address, size)], "Shared_Clean")
            backed += bytes_in([(address, size)], "Private_Clean")
            assert backed >= PAGE
            check_memory(pager, files)


def test_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps between two tensors of a layer are read along: padding, or the layer's own tensors."""
    path = tmp_path / "f"
    scale = PAGE // 4096
    records, _ = one_file(path, [scale * n for n in (50_000, 20_000, 50_000, 20_000, 50_000)])
    first, between, second, gap, third = records
    files = {path: [MappedRange(1 << 40, scale * 200_000, 0)]}

    def n_parts(layer: LayerWeights, resident=(), untouched=()) -> int:
        (paged,) = plan_paging([layer], resident, files, untouched).layers
        assert paged is not None
        return len(paged.parts)

    whole = LayerWeights((first, between, second, third), frozenset({"t1"}))
    assert n_parts(whole) == 1
    assert n_parts(whole, resident=[gap]) == 2
    assert n_parts(whole, untouched=[gap]) == 2
    assert n_parts(whole, resident=[between]) == 2  # another mapping: it must stay
    bare = LayerWeights((first, second, third))
    assert n_parts(bare) == 1
    assert n_parts(bare, untouched=[between, gap]) == 3
    other = LayerWeights((gap,))
    plan = plan_paging([whole, other], (), files)
    assert [len(layer.parts) for layer in plan.layers if layer] == [2, 1]
    monkeypatch.setattr("offload.paging.spans.MAX_GAP_BYTES", scale * 19_999)
    assert n_parts(whole) == 3


def test_tensors_that_cannot_be_paged(tmp_path: Path) -> None:
    path = tmp_path / "f"
    (a, b, c), _ = one_file(path, [50_000, 20_000, 50_000])
    files = {path: [MappedRange(1 << 40, 122_880, 0)]}
    for layers, resident in (
        ([LayerWeights((a,)), LayerWeights((a, b))], []),
        ([LayerWeights((a, b))], [b]),
    ):
        with pytest.raises(ValueError, match="also another layer's or resident"):
            plan_paging(layers, resident, files)
    crossing = TensorRecord("x", "U8", (9,), path, 49_995, 9)
    with pytest.raises(ValueError, match="overlap"):
        plan_paging([LayerWeights((a, b))], [crossing], files)
    shared = LayerWeights((a,), frozenset({"t0"}))
    assert len(plan_paging([shared, shared], [a], files).resident) == 1
    for wrong in (
        {},
        {path: []},
        {path: [MappedRange(1 << 40, 8192, 0)]},
        {path: [MappedRange(1 << 40, 122_880, 0), MappedRange(1 << 41, 122_880, 0)]},
        {path: [MappedRange(1 << 40, 118_784, 4096)]},
    ):
        with pytest.raises(AddressSpaceError, match="mapped (0|2) times"):
            plan_paging([LayerWeights((a, b))], [c], wrong)


def test_a_layer_smaller_than_a_page_is_resident(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[100], [30_000], [], [0], [8191]], padding=1)
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 5, poison=True) as pager,
    ):
        assert pager.n_slots == 2
        files.check(0)
        files.run_passes(pager, 3)


def test_an_overhead_that_is_no_overhead(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[50 * HUGE + 1], [3 * HUGE]])
    for n_slots in (1, 2, 3):
        overhead = paging_overhead_bytes(weights.layers, n_slots)
        assert 0 < overhead <= min(n_slots, 2) * HUGE + 4 * PAGE
    resident = [layer.with_resident(frozenset(r.name for r in layer.tensors))
                for layer in weights.layers]  # fmt: skip
    assert paging_overhead_bytes(resident, 3) <= 2 * PAGE
    assert paging_overhead_bytes([], 3) == 0


CHILD = """
import ctypes, sys
from pathlib import Path
from mapped_weights import MappedWeights
from weight_files import write_weights
from offload.paging.pager import Pager
from offload.storage.aligned import PAGE_BYTES

small = 8 * PAGE_BYTES
files = MappedWeights(write_weights(Path(sys.argv[1]), [[small], [5000000], [small]]))
pager = Pager(files.layers, [], files.mappings, 2)
use, moment = int(sys.argv[2]), sys.argv[3]
for index in range(3):
    if moment == "before" and index == use:
        break
    with pager.layer(index):
        files.check(index)
if moment == "closed":
    pager.close()
print("alive", flush=True)
address = files.address(files.layers[use].tensors[0])
if moment == "write":
    pager.enter(use)
    ctypes.memset(address + PAGE_BYTES, 1, 1)
files.check(use)
print("survived")
"""


@pytest.mark.slow_except(3)
@needs_whole_pages
@pytest.mark.parametrize("moment", ["before", "after", "closed", "write"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_absent_layer_faults(tmp_path: Path, layer: int, moment: str) -> None:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), str(root / "tests" / "helpers")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(layer), moment],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGSEGV), done.stderr

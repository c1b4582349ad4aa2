"""Decoding is timed again after a change in anything that its speed depends on."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from backends.contract.curve import ComputeCurve
from backends.packed import by_numpy, decoder, timing
from backends.packed.codec import (
    CODECS,
    QUANTISATIONS,
    as_described,
    check_packed,
    example,
    example_bytes,
)
from backends.packed.gptq import _ascends
from backends.packed.tensor import PackedTensor


@pytest.mark.parametrize("scheme", CODECS)
def test_a_cached_timing_is_of_this_code(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = timing._key(scheme, 2)
    assert before == timing._key(scheme, 2) != timing._key(scheme, 1)
    for place, name, value in (
        (timing, "_REVISION", 0),
        (timing, "_SHAPE", (128, 512)),
        (decoder, "PIECE_BYTES", 1 << 20),
        (torch, "__version__", "1.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert timing._key(scheme, 2) != before


def test_loops_are_compiled_for_twelve_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba takes 100 MB of memory, which the other formats do not need."""
    asked = []

    def kernels() -> ModuleType:
        asked.append(1)
        return by_numpy

    monkeypatch.setattr(timing, "fastest_kernels", kernels)
    monkeypatch.setattr(timing, "cached_curve", lambda *_: ComputeCurve((1,), (0.5,), (0.7,)))
    for scheme in CODECS:
        timing._measure.__wrapped__(scheme, 1, None)
    assert asked == [1]


def test_gptq_is_timed_in_the_order_that_its_settings_say() -> None:
    """Time in order without a list of groups; otherwise with a list of equally long groups that lie
    apart, which decodes differently from a list in order or one of zeros in memory."""
    plain, reordered = (
        as_described(QUANTISATIONS["gptq"], {"desc_act": is_reordered})
        for is_reordered in (False, True)
    )
    assert len(example(plain.name, (256, 512)).parts) == 3
    tensor = example(reordered.name, (256, 512))
    check_packed(PackedTensor(tensor.record, tensor.parts))
    groups = example_bytes(tensor)[3].view(torch.int32)
    assert not _ascends(groups, 4)
    assert groups.bincount().tolist() == [128] * 4
    assert (groups[1:] != groups[:-1]).float().mean() > 0.5

"""Decoding is timed again after a change in anything that its speed depends on."""

from __future__ import annotations

import pytest
import torch

from backends.packed import timing
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
    before = timing._key("decode", scheme, 2)
    assert before == timing._key("decode", scheme, 2) != timing._key("decode", scheme, 1)
    assert before != timing._key("products", scheme, 2)
    for place, name, value in (
        (timing, "_REVISION", 0),
        (timing, "_SHAPE", (128, 512)),
        (torch, "__version__", "1.0"),
        (timing, "version", lambda _: "1.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert timing._key("decode", scheme, 2) != before


@pytest.mark.parametrize("scheme", CODECS)
def test_products_and_decoding_are_timed(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SHAPE", (128, 512))
    monkeypatch.setattr(timing, "WEIGHT_BYTES", 1)
    assert timing._time_decoding(scheme, 1).seconds(1) > 0
    curve = timing._time(scheme, 2, None)
    assert 0 < curve.seconds(1) < curve.seconds(128)


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

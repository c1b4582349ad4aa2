"""What decoding takes is measured again where something that it depends on changed."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from backends.contract.curve import ComputeCurve
from backends.packed import by_numpy, decoder, timing
from backends.packed.codec import CODECS


@pytest.mark.parametrize("scheme", CODECS)
def test_a_kept_figure_is_of_this_code(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """numba takes 100 MB of memory, which the others need not."""
    asked = []

    def kernels() -> ModuleType:
        asked.append(1)
        return by_numpy

    monkeypatch.setattr(timing, "fastest_kernels", kernels)
    monkeypatch.setattr(timing, "kept_curve", lambda *_: ComputeCurve((1,), (0.5,), (0.7,)))
    for scheme in CODECS:
        timing._measure.__wrapped__(scheme, 1, None)
    assert asked == [1]

"""Notes on sequences that wait."""

from __future__ import annotations

import logging
import re

import pytest

from specdec.policy.kv_price import KvPrice
from specdec.policy.waiting_notes import WaitingNotes


@pytest.mark.parametrize(
    ("kv_tokens", "num_all_tokens", "advised"),
    [(512, 700, 768), (512, 1025, 1280), (512, 500, 768), (500, 499, 512), (640, 640, 768)],
)
@pytest.mark.parametrize("token_bytes", [0, 1024])
def test_the_advised_capacity_is_larger(
    kv_tokens: int,
    num_all_tokens: int,
    advised: int,
    token_bytes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        notes = WaitingNotes(kv_tokens, KvPrice(token_bytes))
        notes.note_capacity(100, num_all_tokens, 1)
        notes.note_capacity(100, num_all_tokens, 1)
    (line,) = caplog.messages
    assert re.search(r"--kv-tokens (\d+)", line)[1] == str(advised)
    assert line.endswith("holds layers") == (token_bytes > 0)

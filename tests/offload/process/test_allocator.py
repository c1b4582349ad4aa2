"""Freed memory returns to the system: otherwise it would count as the process's base."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="calls of glibc")

# Blocks freed below one that stays: the heap cannot shrink from its end.
RETAINED = """
from offload.process.memory import process_memory
from offload.process.allocator import free_large_blocks_at_once, give_back_freed
{before}
bytearray({size})  # its size becomes the threshold below which blocks share the heap
blocks = [bytearray({size}) for _ in range({count})]
stays = [bytearray(100_000) for _ in range(50)]
filled = process_memory().rss_bytes
del blocks
{after}
print(filled - process_memory().rss_bytes)
"""


def freed_bytes(**parts: object) -> int:
    code = RETAINED.format(**{"before": "", "after": "", **parts})
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    return int(run.stdout)


def test_large_blocks_go_back_when_they_are_freed() -> None:
    size, count = 20 * 2**20, 5
    assert freed_bytes(size=size, count=count, before="free_large_blocks_at_once()") > 90 * 2**20


def test_small_blocks_go_back_when_asked_for() -> None:
    size, count = 100_000, 1000
    assert freed_bytes(size=size, count=count, after="give_back_freed()") > 90_000_000

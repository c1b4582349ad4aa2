"""A process forked while layers stream: it takes no memory of the ring, and ends.

The ring's addresses are taken in the child, too: what it maps itself must not come to lie there,
because collecting the model unmaps them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mapped_weights import mapped, needs_whole_pages
from paging import page_weights, slot_ranges
from streaming import small_weights
from system_probes import needs_advice

from offload.paging.pager import Pager
from offload.ring.streamer import WeightStreamer

pytestmark = [
    pytest.mark.usefixtures("no_thread_is_left"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # for forking with threads
]


@contextmanager
def forked() -> Iterator[int]:
    """Return the id of a child that waits for the end of the block."""
    waits, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    os.close(waits)
    try:
        yield child
    finally:
        os.close(ends)
        assert os.waitpid(child, 0)[1] == 0


def kilobytes(process: int, address: int) -> int | None:
    """Return the resident size of the mapping at an address; None if nothing is mapped."""
    is_there = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(match[1], 16) <= address < int(match[2], 16)
        elif is_there and line.startswith("Rss:"):
            return int(line.split()[1])
    return None


@needs_advice
def test_a_child_does_not_get_the_streamers_slots(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    with WeightStreamer(weights.layers, 2, n_readers=2) as streamer:
        weights.run_passes(streamer, 1)
        ring = streamer._cursor._ring
        assert ring is not None
        with forked() as child:
            for slot in ring.slots:
                assert kilobytes(os.getpid(), slot.buffer.address)
                assert kilobytes(child, slot.buffer.address) == 0
            weights.run_passes(streamer, 2)


@needs_advice
def test_a_child_does_not_get_the_pagers_slots_wherever_their_pages_are(tmp_path: Path) -> None:
    weights = page_weights(tmp_path)
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, n_readers=2) as pager,
    ):
        files.run_passes(pager, 2)
        with pager.layer(0):
            places = [start for start, _ in slot_ranges(pager)]
            part = pager._plan.layers[0].parts[0]
            with forked() as child:
                assert kilobytes(os.getpid(), part.address)
                for address in (*places, part.address):
                    assert kilobytes(child, address) == 0
        files.run_passes(pager, 2)


PROGRAM = """
import os, sys, threading, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from streaming import small_weights
from offload.ring.streamer import WeightStreamer

streamer = WeightStreamer(small_weights(Path(sys.argv[1])).layers, 2)
lock = streamer._cursor._ring.lock
is_held, may_go = threading.Event(), threading.Event()
def hold():
    with lock:
        is_held.set()
        may_go.wait()
threading.Thread(target=hold).start()
is_held.wait()
child = os.fork()
if child == 0:
    sys.exit(0)
may_go.set()
for _ in range(1000):
    if os.waitpid(child, os.WNOHANG)[0]:
        break
    time.sleep(0.01)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
streamer.close()
"""


COLLECTING = """
import gc, mmap, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from mapped_weights import MappedWeights
from paging import page_weights
from offload.paging.pager import Pager
from offload.ring.streamer import WeightStreamer

weights = page_weights(Path(sys.argv[1]))
streamer = WeightStreamer(weights.layers, 3)
files = MappedWeights(weights)
pager = Pager(files.layers, [], files.mappings, 3)
files.run_passes(pager)
child = os.fork()
if child == 0:
    own = [mmap.mmap(-1, 4096) for _ in range(1000)]
    pager.close()
    del pager, streamer
    gc.collect()
    for memory in own:
        memory[:] = bytes(4096)
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@needs_whole_pages
def test_a_child_that_collects_models_keeps_its_own_memory(tmp_path: Path) -> None:
    assert run_program(COLLECTING, tmp_path) == ""


def test_a_child_ends_whatever_a_reader_held_when_it_was_forked(tmp_path: Path) -> None:
    assert run_program(PROGRAM, tmp_path) == ""


def run_program(program: str, folder: Path) -> str:
    """Return its error, if any."""
    root = Path(__file__).parents[3]
    paths = (folder, root / "tests" / "helpers", root)
    command = [sys.executable, "-c", program, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"exit code {done.returncode}: {done.stderr}" if done.returncode else ""

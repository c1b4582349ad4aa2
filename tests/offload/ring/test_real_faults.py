"""Reads that the kernel fails or interrupts, as `strace` makes it do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import sys
from pathlib import Path
from weight_files import write_weights
from offload.storage.direct_io import StorageError
from offload.ring.streamer import WeightStreamer

weights = write_weights(Path(sys.argv[1]), [[9000], [5000], [12000]])
n_good = n_bad = 0
with WeightStreamer(weights.layers, 2, read_bytes=4096, n_readers=1, poison=True) as streamer:
    while n_good < 3 and n_bad < 20:
        try:
            weights.run_passes(streamer)
            n_good += 1
        except StorageError as error:
            assert "Input/output error" in str(error)
            n_bad += 1
print(n_good, "passes,", n_bad, "errors")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    ("fault", "output"),
    [
        ("error=EIO:when=2", "3 passes, 1 errors"),
        ("error=EIO:when=5+4", None),  # every fourth read
        ("error=EIO:when=2+", "0 passes, 20 errors"),
        ("error=EINTR:when=2+2", "3 passes, 0 errors"),
    ],
)
def test_faults_of_real_reads(tmp_path: Path, fault: str, output: str | None) -> None:
    root = Path(__file__).parents[3]
    calls = "preadv,preadv2"
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}"]
    argv = [*strace, "-e", f"inject={calls}:{fault}", sys.executable, "-c", CHILD, str(tmp_path)]
    path = os.pathsep.join([str(root), str(root / "tests" / "helpers")])
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("this system does not allow tracing")
    assert done.returncode == 0, done.stderr
    assert output is None or done.stdout.strip() == output

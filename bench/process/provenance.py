"""Provenance of results: revision, versions, command, machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from offload.process.memory import memory_limit

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple("torch transformers numpy safetensors accelerate airllm llama-cpp-python".split())


def collect(argv: Sequence[str], model: Path | None = None) -> dict[str, Any]:
    """Return what is needed to repeat a measurement; `model` adds the storage that it is on."""
    result: dict[str, Any] = {
        "git_revision": git_revision(),
        "versions": versions(),
        "argv": list(argv),
        "machine": machine(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if model is not None:
        result["storage"] = storage(model)
    return result


def git_revision(root: Path = ROOT) -> str | None:
    """Return the commit, with "+changes" when files differ; None outside our own repository."""
    # An installed copy may lie inside some other project's repository: ask for a file of ours.
    if not _git(root, "ls-files", "--error-unmatch", "bench/process/provenance.py"):
        return None
    revision = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}+changes" if revision and changes else revision


def versions() -> dict[str, str]:
    from specdec import __version__

    result = {"specdec": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result


def machine() -> dict[str, Any]:
    import psutil

    limit = memory_limit()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "memory_limit_bytes": limit.n_bytes,
        "memory_limit_source": limit.source,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def storage(path: Path) -> dict[str, Any]:
    """Return the device below a path, as the kernel lists it."""
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return {"device": device}
    for line in lines:
        fields = line.split()
        if fields[2] == device and "-" in fields:
            kind, source = fields[fields.index("-") + 1 :][:2]
            return {"device": device, "source": source, "file_system": kind}
    return {"device": device}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"

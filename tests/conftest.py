"""Shared fixtures: tiny random checkpoints instead of mocks or downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# One core per process: libraries read this when they are loaded. Threads of several processes
# waiting for each other on busy cores made the slowest files three times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("untimed", deadline=None)  # no assertions on time
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `slow_except` leaves out as slow."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow_except"):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for same in cases.values():
        (n_quick,) = same[0].get_closest_marker("slow_except").args
        quick = {len(same) * i // n_quick for i in range(n_quick)}
        for index, item in enumerate(same):
            if index not in quick:
                item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def _offline() -> None:
    """Block all network access in tests."""
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the machine measurements of the tests apart from the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Restore the environment, which commands that run in this process set: `-v` the verbosity of
    libraries, which the processes of later tests would take for the user's wish."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each test plan as in a fresh process: without the suite's memory use, without acceptance
    statistics of any model, and without other tests preventing measurements from being cached."""
    from offload.process.memory import ProcessMemory

    fresh = ProcessMemory(
        rss_bytes=400 << 20, anonymous_bytes=300 << 20, swap_bytes=0, peak_rss_bytes=400 << 20
    )
    monkeypatch.setattr("specdec.planning.memory.base.process_memory", lambda: fresh)
    monkeypatch.setattr("specdec.planning.saved_statistics.load_cached", lambda path: None)
    monkeypatch.setattr("offload.process.other_processes.seconds_of_other_processes", lambda: 0.0)


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory):
    """checkpoint_factory(family, seed=0, **overrides) -> directory of a tiny fp32 checkpoint."""
    from checkpoints import save_tiny_checkpoint

    made: dict[tuple, Path] = {}

    def make(family: str, seed: int = 0, **overrides: object) -> Path:
        key = (family, seed, repr(sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{seed}")
            made[key] = save_tiny_checkpoint(family, directory, seed, **overrides)
        return made[key]

    return make


@pytest.fixture
def _torch_threads() -> Iterator[None]:
    """Restore torch's thread count after tests that set it."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)

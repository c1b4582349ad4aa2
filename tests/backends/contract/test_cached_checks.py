"""Results of machine checks are cached and reused while nothing that decides them changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.contract.cached_checks import CachedChecks, machine


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def keep(actual: int | None) -> None:
    checks = CachedChecks("library 1", (1, 2))
    assert checks.find("product", lambda: actual) == actual
    checks.save()


@pytest.mark.parametrize("actual", [2, None])
def test_what_was_found_is_not_looked_for_again(actual: int | None) -> None:
    keep(actual)
    assert CachedChecks("library 1", (1, 2)).find("product", lambda: 1) == actual


def test_another_version_of_a_library_is_tried_out() -> None:
    keep(2)
    assert CachedChecks("library 2", (1, 2)).find("product", lambda: 1) == 1


@pytest.mark.parametrize("name", ["MKL_CBWR", "OMP_THREAD_LIMIT", "ONEDNN_MAX_CPU_ISA"])
def test_settings_of_the_libraries_are_tried_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting makes a library use other kernels or another number of threads."""
    keep(2)
    monkeypatch.setenv(name, "1")
    assert CachedChecks("library 1", (1, 2)).find("product", lambda: 1) == 1


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GGML_NO_BACKTRACE"])
def test_how_threads_wait_decides_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a prompt cache file would count as another machine's in the next run."""
    monkeypatch.delenv(name, raising=False)
    before = machine("library 1")
    monkeypatch.setenv(name, "1")
    assert machine("library 1") == before


def test_a_file_of_rubbish_is_found_out_again(tmp_path: Path) -> None:
    keep(2)
    (path,) = (tmp_path / "specdec").iterdir()
    for rubbish in ("", "{", "[2]", '{"product": "2"}', '{"product": 7}', '{"product": true}'):
        path.write_text(rubbish)
        assert CachedChecks("library 1", (1, 2)).find("product", lambda: 1) == 1, rubbish


def test_a_file_that_cannot_be_cached_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(2)
    (path,) = (tmp_path / "specdec").iterdir()
    path.unlink()
    path.mkdir()
    keep(2)
    assert f" is not cached: {path}: Is a directory; " in caplog.text

"""`import specdec`: quick, torch-free, and checking its own packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).resolve().parent.parent


def run_python(code: str, *, cwd: Path, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, specdec; specdec.SpecdecError; specdec.__version__\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves() -> None:
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
    assert set(specdec.__all__) <= set(dir(specdec))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        specdec.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ["offload", "backends"])
def test_a_shadowing_package_is_named(tmp_path: Path, name: str) -> None:
    intruder = tmp_path / name
    intruder.mkdir()
    (intruder / "__init__.py").write_text("")
    done = run_python("import specdec", cwd=tmp_path, path=f"{tmp_path}:{ROOT}")
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert str(intruder) in done.stderr


def test_a_shadowing_module_is_named(tmp_path: Path) -> None:
    intruder = tmp_path / "offload.py"
    intruder.write_text("")
    done = run_python("import specdec", cwd=tmp_path, path=f"{tmp_path}:{ROOT}")
    assert done.returncode != 0
    assert str(intruder) in done.stderr


def test_a_missing_neighbour_is_named(tmp_path: Path) -> None:
    (tmp_path / "specdec").symlink_to(ROOT / "specdec")
    with pytest.raises(ImportError, match="offload.*is in the way"):
        specdec._check_neighbours(tmp_path)

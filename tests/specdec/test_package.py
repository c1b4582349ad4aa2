"""`import specdec`: quick, torch-free, and checking its own packages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import specdec
from offload.distribution import DISTRIBUTION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ALL = ("gguf", "grammar", "serve", "ray", "pack", "bench")
PACKAGES = ("specdec", "offload", "backends", "bench")
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


def copied(folder: Path) -> Path:
    """Return a folder with links to the files of our packages, whose `__init__.py` may differ."""
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        for item in (ROOT / name).iterdir():
            if item.name == "__init__.py":
                (folder / name / item.name).write_bytes(item.read_bytes())
            else:
                (folder / name / item.name).symlink_to(item)
    return folder


def test_a_missing_neighbour_is_named(tmp_path: Path) -> None:
    root = copied(tmp_path / "root")
    shutil.rmtree(root / "offload")
    done = run_python("import specdec", cwd=tmp_path, path=str(root))
    # A checkout that is installed beside it, as for these tests, is what is found.
    named_in = rf"from {root / 'offload'}, but (it is missing|\S+ is in the way): rename it"
    assert re.search(named_in, done.stderr)


@pytest.mark.parametrize("name", ["offload", "backends"])
def test_files_of_another_distribution_are_named(tmp_path: Path, name: str) -> None:
    """Two distributions with a package of one name are installed into one folder."""
    root = copied(tmp_path / "root")
    (root / name / "__init__.py").write_text('"""Another program."""\n')
    done = run_python("import specdec", cwd=tmp_path, path=str(root))
    assert f"from {root / name}, but another distribution" in done.stderr


@pytest.mark.parametrize("is_overwritten", [False, True])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("specdec-bench", "from specdec.cli.entry import bench_main as main; "),
        ("specdec", "from specdec.cli.entry import main; import sys; sys.argv[1:] = ['demo']; "),
    ],
)
def test_another_bench_is_one_line(
    tmp_path: Path, command: str, code: str, is_overwritten: bool
) -> None:
    root = copied(tmp_path / "root")
    intruder = root if is_overwritten else tmp_path / "before"
    (intruder / "bench").mkdir(parents=True, exist_ok=True)
    (intruder / "bench" / "__init__.py").write_text('"""Another program."""\nraise RuntimeError\n')
    done = run_python(
        f"{code}raise SystemExit(main(['demo', '--size', '1', '--help']))",
        cwd=tmp_path,
        path=f"{intruder}:{root}",
    )
    if command == "specdec" and not is_overwritten and sys.version_info >= (3, 11):
        assert done.returncode == 0, done.stderr  # the benchmark finds its own packages first
        return
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{command}: error: specdec needs its own package `bench`")
    assert done.stderr.count("\n") == 1


def test_a_foreign_bench_leaves_the_library_alone(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("raise RuntimeError")
    done = run_python("import specdec; specdec.load", cwd=tmp_path, path=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr


def test_every_package_has_the_mark() -> None:
    for name in PACKAGES[1:]:
        assert import_module(name).PART_OF == DISTRIBUTION


def test_extras_are_named_by_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    extras = project["optional-dependencies"]
    named_in = re.compile(rf"install_command\([\"'](\w+)|{DISTRIBUTION}\[(\w+)\]'")
    files = [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    files += [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    named = {a or b for path in files for a, b in named_in.findall(path.read_text())}
    assert named <= set(extras)
    assert named >= {"gguf", "serve", "grammar"}


def test_nobody_is_told_to_install_another_project() -> None:
    """`specdec` on PyPI is another project's."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile"]
    wrong = re.compile(r"pip install[^\n`]*[ '\"]specdec(?![-\w/.])")
    assert wrong.search("pip install 'specdec[gguf]'")
    named_in = [path.name for path in files if wrong.search(path.read_text())]
    assert not named_in


def test_all_extras_are_those_of_a_user() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    assert everything == f"{DISTRIBUTION}[{','.join(name for name in ALL if name in extras)}]"
    assert set(extras) == {*ALL, "all", "dev", "try"}

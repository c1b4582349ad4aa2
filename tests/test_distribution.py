"""The distribution: its metadata, the files around it, and the image."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from release_check import wheel_metadata

ROOT = Path(__file__).resolve().parent.parent
URL = "https://github.com/example/specdec"


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_are_absolute(hook) -> None:
    text = hook.with_absolute_links((ROOT / "README.md").read_text(), URL, "v1.0")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert f"{URL}/blob/v1.0/docs/benchmarks.md#memory-and-start-up" in targets


def test_links_in_every_form(hook) -> None:
    text = "![page](docs/page.png) [a\nb](docs/a.md#b) [c](#c) [d](https://d) <https://e>"
    assert hook.with_absolute_links(text, URL, "v1") == (
        f"![page]({URL}/raw/v1/docs/page.png) [a\nb]({URL}/blob/v1/docs/a.md#b) "
        "[c](#c) [d](https://d) <https://e>"
    )


@pytest.mark.parametrize(
    "remote",
    [
        f"{URL}.git",
        "git@github.com:example/specdec.git",
        "https://me:secret@github.com/example/specdec",
    ],
)
def test_the_address_is_that_of_the_remote(hook, tmp_path, monkeypatch, remote) -> None:
    monkeypatch.delenv("SPECDEC_PROJECT_URL", raising=False)
    assert hook.project_url(tmp_path) == ""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert hook.project_url(tmp_path) == ""
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    assert hook.project_url(tmp_path) == URL
    monkeypatch.setenv("SPECDEC_PROJECT_URL", "https://example.org/mirror/")
    assert hook.project_url(tmp_path) == "https://example.org/mirror"


def test_a_remote_that_is_no_web_page_is_no_address(hook, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SPECDEC_PROJECT_URL", "/srv/git/specdec")
    assert hook.project_url(tmp_path) == ""


def test_a_wheel_has_urls_and_the_commands(tmp_path, monkeypatch) -> None:
    build = pytest.importorskip("hatchling.build")
    monkeypatch.setenv("SPECDEC_PROJECT_URL", URL)
    monkeypatch.chdir(ROOT)
    wheel = tmp_path / build.build_wheel(str(tmp_path))
    metadata = wheel_metadata(wheel)
    assert metadata["Name"] == "specdec-stream"
    assert f"Security, {URL}/security/advisories/new" in metadata.get_all("Project-URL")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (item for item in archive.namelist() if item.endswith("entry_points.txt"))
        scripts = archive.read(name).decode()
    assert "specdec = specdec.cli.entry:main" in scripts
    assert "specdec-bench = specdec.cli.entry:bench_main" in scripts


def test_issue_templates_are_forms() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [path for path in folder.glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form)
        fields = [item for item in form["body"] if item["type"] != "markdown"]
        assert len({item["id"] for item in fields}) == len(fields) > 0


def no_docker() -> str:
    """Return why no image can be built here, or ""."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 else "docker's daemon does not answer"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_runs_a_gguf_model() -> None:
    if reason := no_docker():
        pytest.skip(reason)
    tag = "specdec-test"
    subprocess.run(["docker", "build", "-q", "-t", tag, str(ROOT)], check=True)
    try:
        words = "run --raw -m pair:target.gguf -md pair:draft.gguf -n 8 -p".split()
        command = ["docker", "run", "--rm", "--network=none", tag, *words, "def area(r):"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    finally:
        subprocess.run(["docker", "rmi", "-f", tag], capture_output=True)


def test_the_image_is_built_from_files_that_exist() -> None:
    """Names in the Dockerfile, checked without docker."""
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "COPY . ." in text
    needed = ("constraints.txt", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
    assert all((ROOT / name).exists() and name not in ignored for name in needed)
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert set(extras.split(",")) == {"gguf", "serve"}


def test_the_job_of_the_newest_drops_every_upper_bound(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text())
    job = workflow["jobs"]["test"]
    (drop,) = (step["run"] for step in job["steps"] if step.get("name") == "Drop upper bounds")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert ",<" in (tmp_path / "pyproject.toml").read_text()
    subprocess.run(["bash", "-c", drop], cwd=tmp_path, check=True)
    assert ",<" not in (tmp_path / "pyproject.toml").read_text()

"""Plans of models on a hub, from their headers: a local server speaks the hub's protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve_hub

from offload.formats.checkpoint import WeightIndex
from offload.formats.gguf_index import GgufIndex
from offload.formats.outline import is_outline, measured_file
from offload.formats.tensors import TensorIndex
from specdec.models import hub as hub_models
from specdec.models import outlines
from specdec.models.hub import HubError
from specdec.models.names import resolve_model
from specdec.models.outlines import planned_model

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT, GGUF = resolve_model("pair:target"), resolve_model("pair:target.gguf")


def split_checkpoint(folder: Path) -> Path:
    """Copy the embedded target as two shards and an index; one header is longer than a first range
    of 256 KiB."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir()
    for path in CHECKPOINT.glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = sorted(tensors)
    shards = {"model-00001-of-00002": names[::2], "model-00002-of-00002": names[1::2]}
    weight_map = {}
    for number, (shard, own) in enumerate(shards.items()):
        metadata = {"format": "pt", "long": number * 300_000 * "x"}
        save_file({name: tensors[name] for name in own}, folder / f"{shard}.safetensors", metadata)
        weight_map |= dict.fromkeys(own, f"{shard}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    root = tmp_path_factory.mktemp("hub")
    (root / "gguf" / "sub").mkdir(parents=True)
    for name in ("tiny-Q8_0.gguf", "sub/other-Q4_0.gguf"):
        shutil.copyfile(GGUF, root / "gguf" / name)
    (root / "gguf" / "cut-Q2_K.gguf").write_bytes(GGUF.read_bytes()[:20_000])
    (root / "gguf" / "README.md").write_text("tiny")
    (root / "text").mkdir()
    (root / "text" / "README.md").write_text("no model")
    repositories = {
        "some/sharded": split_checkpoint(root / "sharded"),
        "some/single": CHECKPOINT,
        "some/GGUF": root / "gguf",
        "some/text": root / "text",
    }
    with serve_hub(repositories) as server:
        yield server


@pytest.fixture(autouse=True)
def connected(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(constants + "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants + "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants + "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants + "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants + "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(outlines, "_outlines", {})
    hub.ranges.clear()


def described(index: TensorIndex) -> list[tuple[object, ...]]:
    return sorted((r.name, r.dtype, r.shape, r.path.name, r.offset) for r in index.values())


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["sharded", "single"])
def test_an_outline_has_the_tensors_of_the_checkpoint(hub: FakeHub, name: str) -> None:
    path, local = planned_model(f"some/{name}"), hub.repositories[f"some/{name}"]
    assert described(WeightIndex.from_directory(path)) == described(
        WeightIndex.from_directory(local)
    )
    for file in local.glob("*.safetensors"):
        assert (path / file.name).stat().st_size == file.stat().st_size
        assert is_outline(path / file.name)
        assert measured_file(path / file.name) != path / file.name
    assert disk_bytes(path) < 1 << 20
    assert 0 < hub.sent_bytes(".safetensors") < 1 << 20
    hub.ranges.clear()
    assert planned_model(f"some/{name}") == path
    assert hub.ranges == []


def test_an_outline_has_the_tensors_and_the_vocabulary_of_the_gguf(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_models, "_GGUF_BYTES", 1 << 14)  # grown several times
    monkeypatch.setattr("offload.formats.gguf_metadata._WINDOW_BYTES", 1 << 12)
    path = planned_model("some/GGUF:tiny-q8_0")
    actual, expected = GgufIndex.from_path(path), GgufIndex.from_path(GGUF)
    assert [item[:3] + item[4:] for item in described(actual)] == [
        item[:3] + item[4:] for item in described(expected)
    ]
    assert dict(actual.metadata) == dict(expected.metadata)
    assert path.stat().st_size == GGUF.stat().st_size
    assert len(hub.ranges) > 3
    assert hub.sent_bytes(".gguf") < GGUF.stat().st_size / 4


def test_a_model_in_a_folder_of_its_repository() -> None:
    assert planned_model("some/GGUF:Q4_0").name == "other-Q4_0.gguf"


def test_a_model_that_was_downloaded_is_planned_from_its_own_files(hub: FakeHub) -> None:
    path = resolve_model("some/single")
    hub.ranges.clear()
    assert planned_model("some/single") == path
    assert not is_outline(path / "model.safetensors")
    assert hub.ranges == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some/none", r"has no repository some/none, or it is private: .*`hf auth login`"),
        ("gated/one", r"its owner gates it: accept the terms at .*/gated/one, then run `hf auth"),
        ("broken/one", r"answers with status 503: try again later"),
        ("slow/one", r"does not answer within \d+ s: try again, or raise HF_HUB_DOWNLOAD_TIMEOUT"),
        ("some/single@v9", r"has no such revision: name a branch, a tag or a commit"),
        ("some/GGUF:Q9", r"has no GGUF file with 'Q9' in the name: name one of cut-Q2_K.gguf, "),
        ("some/GGUF", r"holds GGUF \(cut-Q2_K.gguf, .*say some/GGUF:cut-Q2_K"),
        ("some/GGUF:Q2_K", r"some/GGUF/cut-Q2_K.gguf .*download it again"),
        ("some/text", r"has no config.json and no GGUF file: it is no language model"),
    ],
)
def test_errors_of_the_hub_are_one_line_with_a_remedy(name: str, message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        planned_model(name)
    assert "\n" not in str(caught.value)
    assert type(caught.value).__name__ in ("HubError", "GgufError")


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127.0.0.1:9 cannot be reached: check the network"):
        planned_model("some/single")


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set: unset it to reach the hub"):
        planned_model("some/single")


@pytest.mark.parametrize("argv", [["-m", "some/sharded"], ["-m", "some/GGUF:tiny", "-md", "mtp"]])
def test_the_command_plans_a_model_on_the_hub(
    hub: FakeHub, tmp_path: Path, argv: list[str]
) -> None:
    environment = {**os.environ, **hub.environment(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "specdec", "plan", "--memory-budget", "2GiB", "--on", "laptop"]
    done = subprocess.run(
        [*command, *argv], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    if "mtp" in argv:  # planned as a downloaded model without a head is
        assert done.returncode == 2
        assert "specdec: error: " in done.stderr
        assert "MTP head" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "is not on this disk: planned from its headers on the hub, 23." in done.stderr
        assert "tokens/s" in done.stdout
    assert not list((tmp_path / "hub").glob(".specdec-*"))

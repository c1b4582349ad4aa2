"""A packed copy computes what its source does, to the bit, and nothing half-written is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_tiny_checkpoint
from forced_streaming import force_streaming
from packed_models import save_packable
from safetensors.torch import load_file, save_file

from backends.contract.backend import PREFIX
from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.model import load_hf_model
from backends.hf.source import HfSource
from backends.packed import decoder
from backends.packed.decoder import Decoder
from backends.packed.twelve_bits import TwelveBits
from backends.packed.writer import PackError
from offload.errors import SpecdecError
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import CheckpointError
from specdec import load
from specdec.packing import pack as packing
from specdec.packing.pack import pack
from specdec.pair import pair_path

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt-neox", "gpt2", "minicpm3")


def logits(folder: Path, is_streamed: bool) -> list[np.ndarray]:
    """Of a prompt, a tree, and a token after it."""
    model = load_hf_model(folder)
    layers = model.layer_weights
    if not is_streamed:
        layers = tuple(one.with_resident(r.name for r in one.tensors) for one in layers)
    with TorchBackend(model, CpuWeights(model, layers, 2 * is_streamed)) as backend:
        found = [backend.prefill([5, 9, 44, 3])]
        ids, rows = backend.extend([7, 8, 9], [PREFIX, PREFIX, PREFIX])
        backend.commit(ids[:1])
        return [*found, *rows, *backend.extend([11], [PREFIX])[1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal_in_every_bit(family: str, tmp_path: Path) -> None:
    plain = save_packable(family, tmp_path / "plain")
    report = pack(plain, tmp_path / "packed")
    assert report.n_packed >= 6
    assert report.n_bytes < report.source_bytes
    expected = logits(plain, is_streamed=False)
    for is_streamed in (False, True):
        found = logits(tmp_path / "packed", is_streamed)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def change_tensors(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


def test_a_copy_computes_in_the_number_format_of_its_source(tmp_path: Path) -> None:
    """F32 embeddings, of fewer bytes than the bf16 matrices before those are packed alone."""
    plain = save_packable("llama", tmp_path / "plain", vocab_size=390)
    change_tensors(plain, lambda name, x: x if "layers" in name else x.float())
    pack(plain, tmp_path / "packed")
    n_outer, n_plain, n_packed = (
        sum(r.n_bytes for r in WeightIndex.from_directory(path).values() if r.dtype == dtype)
        for path, dtype in ((plain, "F32"), (plain, "BF16"), (tmp_path / "packed", "BF16"))
    )
    assert n_packed < n_outer < n_plain
    expected = logits(plain, is_streamed=False)
    for one, other in zip(logits(tmp_path / "packed", False), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_file_that_lost_its_metadata_is_guessed_at(tmp_path: Path) -> None:
    pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    change_tensors(tmp_path / "packed", lambda _, x: x)
    with pytest.raises(SpecdecError, match="U8 weights, or a packed file that lost its metadata"):
        load_hf_model(tmp_path / "packed")


@pytest.mark.parametrize("piece_bytes", [decoder.PIECE_BYTES, 128 * 384 * 2])
def test_a_packed_model_is_a_model_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """The embedded target, which streams: text, session and fingerprint."""
    monkeypatch.setattr(decoder, "PIECE_BYTES", piece_bytes)
    report = pack(pair_path("pair:target"), tmp_path / "packed")
    assert report.n_bytes < 0.79 * report.source_bytes
    assert not report.not_packed
    texts = []
    for model in ("pair:target", tmp_path / "packed"):
        with monkeypatch.context() as patch:
            force_streaming(patch)
            with load(str(model), draft_model="pair:draft", memory_budget="2GiB") as llm:
                texts.append(llm.generate("def add(a, b):", max_tokens=24).text)
    assert texts[0] == texts[1]
    plain, packed = (HfSource(p, BackendOptions()) for p in (pair_path("pair:target"), report.path))
    assert plain.fingerprint() != packed.fingerprint()


def test_embeddings_norms_and_small_tensors_stay(tmp_path: Path) -> None:
    pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    plain, packed = (WeightIndex.from_directory(tmp_path / name) for name in ("plain", "packed"))
    assert list(plain) == list(packed)
    for name, record in packed.items():
        is_matrix = "layers" in name and "norm" not in name
        assert record.scheme == ("BF16_12" if is_matrix else "")
        assert (record.dtype, record.shape) == (plain[name].dtype, plain[name].shape)
        assert is_matrix or record.n_bytes == plain[name].n_bytes


def test_what_describes_the_weights_comes_along(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    (plain / "tokenizer.json").write_text("{}")
    (plain / "LICENSE").write_text("MIT")
    (plain / "pytorch_model.bin").write_bytes(b"pickle")
    pack(plain, tmp_path / "packed")
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert {"config.json", "tokenizer.json", "LICENSE"} <= names
    assert "pytorch_model.bin" not in names


def test_matrices_of_too_many_exponents_stay_as_they_are(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    name = "model.layers.1.mlp.up_proj.weight"
    (path,) = (path for path in plain.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    bits = torch.randint(-(2**15), 2**15, tensors[name].shape, dtype=torch.int16)
    tensors[name] = bits.view(torch.bfloat16)  # NaN and infinity among them
    save_file(tensors, path)
    report = pack(plain, tmp_path / "packed")
    assert list(report.not_packed) == [name]
    assert 0.9 < report.not_packed[name] < 0.96
    assert f"{name} stays bf16: 9" in "\n".join(report.lines())
    record = WeightIndex.from_directory(tmp_path / "packed")[name]
    assert record.scheme == ""
    (copy,) = (p for p in (tmp_path / "packed").glob("*.safetensors") if name in load_file(p))
    assert torch.equal(load_file(copy)[name].view(torch.int16), bits)


def test_exponents_that_no_sample_has_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that was begun with is written as it is."""
    from backends.packed import writer

    monkeypatch.setattr(writer, "_SAMPLES", 1)
    monkeypatch.setattr(writer, "_SAMPLE_WEIGHTS", 1024)
    monkeypatch.setattr(TwelveBits, "piece_weights", 1024)
    plain = save_packable("llama", tmp_path / "plain")
    name = "model.layers.1.mlp.up_proj.weight"
    (path,) = (path for path in plain.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name].view(-1)[1024:] = torch.logspace(-30, 30, 7168).to(torch.bfloat16)
    save_file(tensors, path)
    report = pack(plain, tmp_path / "packed")
    assert list(report.not_packed) == [name]
    (copy,) = (p for p in (tmp_path / "packed").glob("*.safetensors") if name in load_file(p))
    assert torch.equal(load_file(copy)[name], tensors[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_formats_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    plain = save_packable("llama", tmp_path / "plain", dtype)
    with pytest.raises(PackError, match=f"holds {str(dtype)[6:]} weights, and bf16 alone"):
        pack(plain, tmp_path / "packed")


def test_mixtures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="is a mixture of experts"):
        pack(save_tiny_checkpoint("mixtral", tmp_path / "plain"), tmp_path / "packed")


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    pack(plain, tmp_path / "packed")
    with pytest.raises(PackError, match="is packed already"):
        pack(tmp_path / "packed", tmp_path / "again")
    with pytest.raises(PackError, match="is there already"):
        pack(plain, tmp_path / "packed")
    with pytest.raises(PackError, match="is GGUF"):
        pack("pair:target.gguf", tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "packed"}


def test_room_is_looked_for_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PackError, match="1.00 MiB free: make room"):
        pack(plain, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_room_is_looked_for_where_a_link_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there is none, and there it suffices for the weights but not for all files."""
    plain = save_packable("llama", tmp_path / "plain")
    (tmp_path / "there" / "disk").mkdir(parents=True)
    (tmp_path / "packed").symlink_to(tmp_path / "there" / "disk")
    usage = shutil.disk_usage(tmp_path)

    def free(path: Path) -> Any:
        return usage._replace(free=20 << 20 if Path(path).name == "there" else 0)

    monkeypatch.setattr(packing.shutil, "disk_usage", free)
    with (plain / "LICENSE").open("wb") as file:
        file.truncate(8 << 20)
    with pytest.raises(PackError, match="there has 20.00 MiB free: make room"):
        pack(plain, tmp_path / "packed")
    (plain / "LICENSE").unlink()
    pack(plain, tmp_path / "packed")
    assert (tmp_path / "there" / "disk" / "config.json").is_file()


def test_a_copy_that_cannot_be_opened_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.packed import writer

    plain = save_packable("llama", tmp_path / "plain")
    make = writer._header
    monkeypatch.setattr(writer, "_header", lambda *args: make(*args).replace(b"U8", b"I8"))
    with pytest.raises(SpecdecError, match="is stored as I8"):
        pack(plain, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_every_file_and_folder_reaches_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    synced, sync = set(), os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = pack(plain, tmp_path / "packed").path
    assert {one.stat().st_ino for one in (*path.iterdir(), path, tmp_path)} <= synced


def test_folders_made_for_it_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were there before stay, and what is in them."""
    plain = save_packable("llama", tmp_path / "plain")
    (tmp_path / "mine").mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_write_weights", full)
        with pytest.raises(PackError, match=r"cannot write .*: No space left on device"):
            pack(plain, tmp_path / "mine" / "a" / "b" / "packed")
    assert list((tmp_path / "mine").iterdir()) == []
    pack(plain, tmp_path / "mine" / "a" / "b" / "packed")
    assert (tmp_path / "mine" / "a" / "b" / "packed" / "config.json").is_file()


def folders_that_cannot_be(tmp_path: Path) -> dict[str, Path]:
    """By what is said of them."""
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    return {
        "file is there already": tmp_path / "file",
        "file is a file: name a folder elsewhere": tmp_path / "file" / "a" / "packed",
        "nowhere is a link that leads nowhere": tmp_path / "nowhere",
        "cannot write .*circle": tmp_path / "circle",
        "plain is there already": tmp_path / "plain",
        "packed lies in the model's own folder": tmp_path / "plain" / "a" / "packed",
        "/proc/packed": Path("/proc/packed"),
        "File name too long": tmp_path / ("x" * 300),
        "cannot write ~nobody-has-this-name": Path("~nobody-has-this-name"),
    }


@pytest.mark.parametrize("n", range(9))
def test_where_it_cannot_go_is_found_before_reading(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.hf import model

    plain = save_packable("llama", tmp_path / "plain")
    match, out = list(folders_that_cannot_be(tmp_path).items())[n]
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(model, "load_hf_model", lambda _: pytest.fail("it was read"))
    with pytest.raises(PackError, match=match):
        pack(plain, out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mounted_file_system_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    with pytest.raises(PackError, match="is where a file system is mounted: name a folder in it"):
        pack(tmp_path / "plain", tmp_path / "disk")


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "packed").symlink_to(tmp_path / "disk")
    report = pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    assert report.path == tmp_path / "packed"
    assert (tmp_path / "packed").is_symlink()
    assert (tmp_path / "disk" / "config.json").is_file()


def as_the_hub_caches_it(plain: Path, cache: Path) -> Path:
    """The snapshot: links into the blobs."""
    snapshot, blobs = cache / "models--me--it" / "snapshots" / "1", cache / "models--me--it/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        path.rename(blobs / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    return snapshot


def test_links_of_the_hub_s_cache_become_files(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    (plain / "LICENSE").write_text("MIT")
    pack(as_the_hub_caches_it(plain, tmp_path / "cache"), tmp_path / "packed")
    assert (tmp_path / "packed" / "LICENSE").read_text() == "MIT"
    assert not any(path.is_symlink() for path in (tmp_path / "packed").iterdir())


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("../letter.txt", "is a link to .*letter.txt, outside of the checkpoint's folder"),
        ("gone.txt", "notes.txt is missing or cannot be resolved"),
        ("notes.txt", "notes.txt is missing or cannot be resolved"),
        ("folder", "notes.txt leads to .*folder, which is not a regular file"),
        ("/dev/zero", "notes.txt is not a regular file"),
    ],
)
def test_links_that_lead_elsewhere_are_refused(tmp_path: Path, target: str, match: str) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    (plain / "folder").mkdir()
    (tmp_path / "letter.txt").write_text("dear")
    (plain / "notes.txt").symlink_to(target)
    with pytest.raises(SpecdecError, match=match):
        pack(plain, tmp_path / "a" / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "letter.txt"}


def test_folders_do_not_come_along(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    (plain / "LICENSES").mkdir()
    pack(plain, tmp_path / "packed")
    assert not (tmp_path / "packed" / "LICENSES").exists()


def test_what_does_not_come_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    from backends.packed import writer

    write = writer._write_at

    def broken(descriptor: int, data: np.ndarray, offset: int) -> None:
        write(descriptor, data ^ 1 if len(data) == 8192 else data, offset)

    monkeypatch.setattr(writer, "_write_at", broken)
    with pytest.raises(PackError, match="does not come back as it was"):
        pack(plain, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}
    assert not pack(plain, tmp_path / "packed", verify=False).is_verified


def test_a_signal_leaves_nothing(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    out = tmp_path / "packed"
    # The first tensor that is compared waits for the signal.
    code = (
        "import sys, time\n"
        "from backends.packed import writer\n"
        "from specdec.cli.app import main\n"
        "def wait(*_):\n"
        "    print('here', flush=True)\n"
        "    time.sleep(3)\n"
        "writer._OneTensor._written = wait\n"
        f"sys.exit(main(['pack', '-m', {str(plain)!r}, '-o', {str(out)!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    assert any(tmp_path.glob(".packed.partial-*/*.safetensors"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}
    process.stdout.close()


def change_metadata(path: Path, change: dict[str, Any]) -> None:
    """Of every packed tensor in the file, which stays as long."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    packed = json.loads(header["__metadata__"]["specdec.packed"])
    for entry in packed["tensors"].values():
        entry.update(change)
    header["__metadata__"]["specdec.packed"] = json.dumps(packed)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    pack(plain, tmp_path / "packed")
    index = WeightIndex.from_directory(tmp_path / "packed")
    record = index["model.layers.1.mlp.down_proj.weight"]
    with record.path.open("r+b") as file:
        file.seek(record.offset)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj.weight.*base is 255"):
        logits(tmp_path / "packed", is_streamed=True)
    for change, match in (
        ({"shape": [64, 64000]}, "weights take"),
        ({"scheme": "NEW"}, "packed as NEW, and only BF16_12 is known"),
        ({"scheme": "BF16_12", "dtype": "F16"}, "it holds BF16, not F16"),
    ):
        change_metadata(record.path, change)
        with pytest.raises(SpecdecError, match=match):
            HfSource(tmp_path / "packed", BackendOptions())


def test_embeddings_cannot_be_packed(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    pack(plain, tmp_path / "packed")
    index = WeightIndex.from_directory(tmp_path / "packed")
    path = index["model.embed_tokens.weight"].path
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    entry = header["model.embed_tokens.weight"]
    n_bytes = entry["data_offsets"][1] - entry["data_offsets"][0]
    packed = json.loads(header["__metadata__"]["specdec.packed"])
    packed["tensors"]["model.embed_tokens.weight"] = {
        "scheme": "BF16_12",
        "dtype": "BF16",
        "shape": [96, 32],
    }
    assert n_bytes > 64 + 3072 * 3 // 2
    entry.update(dtype="U8", shape=[n_bytes])
    header["__metadata__"]["specdec.packed"] = json.dumps(packed)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])
    with pytest.raises(SpecdecError, match="embed_tokens"):
        HfSource(tmp_path / "packed", BackendOptions())


def test_the_plan_knows_packed_sizes_and_the_buffer(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    pack(plain, tmp_path / "packed")
    own, other = (HfSource(tmp_path / name, BackendOptions()) for name in ("packed", "plain"))
    n_own, n_other = (sum(layer.n_bytes for layer in one.layers) for one in (own, other))
    assert n_own < 0.8 * n_other
    decoding = Decoder(own.model.packed_modules, 1)
    try:
        assert decoding.n_bytes <= own.model.decode_buffer_bytes
        assert own.model.decode_buffer_bytes < max(layer.n_bytes for layer in other.layers)
        assert own.outer_bytes - other.outer_bytes == own.model.decode_buffer_bytes
    finally:
        decoding.close()
    assert own.can_use_gpu


def test_decoding_counts_as_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per stored byte there is a third more to multiply with, and decoding beside it."""
    from backends.contract.curve import ComputeCurve
    from backends.hf import source as hf_source

    pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    multiplying, decoding = ComputeCurve.linear(3.0, 1.0), ComputeCurve((1,), (0.5,), (0.7,))
    monkeypatch.setattr(hf_source, "is_small", lambda _: False)
    monkeypatch.setattr(hf_source, "measure_compute", lambda *_: multiplying)
    monkeypatch.setattr(hf_source, "measure_decoding", lambda *_, **__: decoding)
    plain, packed = (
        HfSource(tmp_path / name, BackendOptions()).measure_compute()
        for name in ("plain", "packed")
    )
    growth = packed.per_byte.seconds(8) - 0.5
    assert 1.25 * plain.per_byte.seconds(8) < growth < 1.35 * plain.per_byte.seconds(8)
    assert packed.outer_seconds(8) == plain.outer_seconds(8)


def test_processes_that_were_killed_leave_nothing_for_long(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f".packed.partial-{dead.pid}"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    pack(plain, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "packed"}
    assert os.listdir(tmp_path / "packed")


def test_decoding_takes_as_long_for_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.packed import timing

    monkeypatch.setattr(timing, "_SHAPE", (128, 512))
    curve = timing._time("BF16_12", 1, None)
    assert 0.0 < curve.seconds(1) == curve.seconds(64)


def test_who_reads_weights_itself_refuses_packed_ones(tmp_path: Path) -> None:
    from specdec.pair.float_weights import read_float32

    pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    record = WeightIndex.from_directory(tmp_path / "packed")["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(CheckpointError, match="packed as BF16_12: name the checkpoint that was"):
        read_float32(record)

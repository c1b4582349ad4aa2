"""Models on the hub before they are downloaded: their headers, read by range requests.

The headers become outlines (`offload.formats.outline`), which planning reads as it reads models on
this disk. All requests name the commit that the first one resolved, so that the files belong
together. `HF_ENDPOINT`, tokens, proxies and timeouts are huggingface_hub's.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from offload.errors import SpecdecError
from offload.formats.checkpoint import find_shards
from offload.formats.gguf_header import header_bytes
from offload.formats.outline import write_outline
from offload.formats.safetensors import MAX_HEADER_BYTES
from offload.units import KIB, MIB
from specdec.models.hub_errors import describe_hub_error
from specdec.models.kinds import models_among
from specdec.models.local_models import SPLIT
from specdec.pair import GGUF_SUFFIX

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

BESIDE_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files that describe a checkpoint: its config, its tokenizer, and the index of its shards."""
_FIRST_BYTES = 256 * KIB
"""First range of a safetensors file: a longer header takes a second request."""
_GGUF_BYTES = 4 * MIB
"""First range of a GGUF file: a vocabulary of 100,000 tokens. Longer ones are read on, each time
as much again."""
_MAX_CANDIDATES = 8
"""GGUF files whose headers are read to tell models from projectors."""
_N_CONNECTIONS = 8
_Result = TypeVar("_Result")


class HubError(SpecdecError):
    """A model on the hub cannot be read; the message says why and what helps."""


class HubRepository:
    """One revision of a repository."""

    def __init__(self, repo_id: str, revision: str | None = None) -> None:
        """Ask the hub for the commit and its files. Raises HubError."""
        from huggingface_hub import HfApi, constants

        self.repo_id = repo_id
        timeout = constants.HF_HUB_ETAG_TIMEOUT

        def look_up() -> ModelInfo:
            return HfApi().model_info(
                repo_id, revision=revision, files_metadata=True, timeout=timeout
            )

        info = self._ask(look_up)
        self._commit = info.sha
        self.sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        """Bytes of each file, by its path in the repository."""

    def write_checkpoint(self, folder: Path) -> list[str]:
        """Write outlines of the weights and copies of the files beside them; return the weights'
        names. Raises HubError and the errors of the headers."""
        top = [name for name in self.sizes if "/" not in name]
        if "config.json" not in top:
            raise HubError(self._no_checkpoint())
        from huggingface_hub import snapshot_download

        snapshot = self._ask(
            lambda: snapshot_download(
                self.repo_id, revision=self._commit, allow_patterns=list(BESIDE_WEIGHTS)
            )
        )
        for path in Path(snapshot).iterdir():
            if path.is_file() and any(path.match(pattern) for pattern in BESIDE_WEIGHTS):
                shutil.copyfile(path, folder / path.name)
        shards = find_shards(folder, top)
        missing = [name for name in shards if name not in self.sizes]
        if missing:
            raise HubError(
                f"{self.repo_id} has no {missing[0]}, which its index names: its upload is "
                "incomplete, name another revision (user/repo@revision)"
            )
        self._write_each(lambda name: self._safetensors_header(name), shards, folder)
        return shards

    def write_gguf(self, part: str, folder: Path) -> Path:
        """Write outlines of the GGUF model whose name has `part` in it; return its first file.

        Raises HubError and the errors of the headers.
        """
        stem = part.removesuffix(GGUF_SUFFIX).lower()
        models = [name for name in self._gguf_models if stem in name.lower()]
        if not models or len(models) > _MAX_CANDIDATES:
            here = ", ".join(models or self._gguf_models[:5]) or "none"
            what = f"{len(models)} GGUF files" if models else "no GGUF file"
            raise HubError(
                f"{self.repo_id} has {what} with {part!r} in the name: name one of {here}"
            )
        for name in models:
            self._write_each(lambda file: self._gguf_header(file), self._splits(name), folder)
        paths = [folder / PurePosixPath(name).name for name in models]
        chosen = paths if len(paths) == 1 else models_among(paths)
        if len(chosen) != 1:
            names = ", ".join(path.name for path in chosen or paths)
            raise HubError(
                f"{self.repo_id} has {len(chosen)} language models with {part!r} in the name, of "
                f"{len(models)} GGUF files: name one of {names}"
            )
        return chosen[0]

    @cached_property
    def _gguf_models(self) -> list[str]:
        """GGUF files, of split models the first ones."""
        names = sorted(name for name in self.sizes if name.endswith(GGUF_SUFFIX))
        splits = ((name, SPLIT.search(name)) for name in names)
        return [name for name, split in splits if split is None or int(split["number"]) == 1]

    def _splits(self, name: str) -> list[str]:
        split = SPLIT.search(name)
        if split is None:
            return [name]
        pattern = rf"{re.escape(name[: split.start()])}-\d{{5}}{re.escape(split['end'])}"
        return sorted(other for other in self.sizes if re.fullmatch(pattern, other))

    def _no_checkpoint(self) -> str:
        if not self._gguf_models:
            return f"{self.repo_id} has no config.json and no GGUF file: it is no language model"
        names = ", ".join(PurePosixPath(name).name for name in self._gguf_models[:5])
        return (
            f"{self.repo_id} holds GGUF ({names}): name a file by a part of its name, say "
            f"{self.repo_id}:{PurePosixPath(self._gguf_models[0]).stem}"
        )

    def _write_each(
        self, header: Callable[[str], bytes], names: Sequence[str], folder: Path
    ) -> None:
        """Write the outlines of several files, flat in one folder."""

        def write(name: str) -> None:
            write_outline(folder / PurePosixPath(name).name, header(name), self.sizes[name])

        with ThreadPoolExecutor(_N_CONNECTIONS) as pool:
            list(pool.map(write, names))

    def _safetensors_header(self, name: str) -> bytes:
        """Return what precedes the data: the length and the JSON header."""
        first = self._read(name, 0, min(_FIRST_BYTES, self.sizes[name]))
        if len(first) < 8:
            return first  # too short a file, which reading the outline will say
        (length,) = struct.unpack("<Q", first[:8])
        end = 8 + length
        if length > MAX_HEADER_BYTES or end > self.sizes[name]:
            return first[:8]  # refused by the same checks as on disk
        return first[:end] + (self._read(name, len(first), end) if end > len(first) else b"")

    def _gguf_header(self, name: str) -> bytes:
        size = self.sizes[name]
        file = _Beginning(lambda start, end: self._read(name, start, min(end, size)))
        n_bytes = header_bytes(file, Path(self.repo_id, name), size)  # type: ignore[arg-type]
        file.seek(0)
        return file.read(n_bytes)

    def _read(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` to `end`, exclusive. Raises HubError."""
        if start >= end:
            return b""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        url = hf_hub_url(self.repo_id, name, revision=self._commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
        headers["Accept-Encoding"] = "identity"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT

        def fetch() -> bytes:
            chunks, n_bytes = [], 0
            with http_stream_backoff("GET", url, headers=headers, timeout=timeout) as response:
                hf_raise_for_status(response)
                if response.status_code != 206 and start:
                    raise HubError(f"{url} is not sent in parts: download the model to plan it")
                for chunk in response.iter_bytes():
                    chunks.append(chunk)
                    n_bytes += len(chunk)
                    if n_bytes >= end - start:  # a server may send the whole file
                        break
            return b"".join(chunks)[: end - start]

        content = self._ask(fetch)
        if len(content) < end - start:
            raise HubError(
                f"{self.repo_id}: {name} ended after {start + len(content)} bytes of "
                f"{self.sizes[name]}: try again"
            )
        return content

    def _ask(self, request: Callable[[], _Result]) -> _Result:
        """Return the result of a request. Raises HubError."""
        try:
            return request()
        except SpecdecError:
            raise
        except Exception as error:  # the client raises many kinds; each is one line here
            raise HubError(
                f"{self.repo_id} is not on this disk, and its headers cannot be read: "
                f"{describe_hub_error(error, self.repo_id)}"
            ) from error


class _Beginning:
    """A file of which the beginning is fetched as far as it is read."""

    def __init__(self, fetch: Callable[[int, int], bytes]) -> None:
        """fetch: returns the bytes from a start to an end, or to the file's end."""
        self._fetch = fetch
        self._bytes = b""
        self._at = 0

    def seek(self, position: int) -> None:
        self._at = position

    def read(self, n_bytes: int) -> bytes:
        end = self._at + n_bytes
        if end > len(self._bytes):
            n_more = max(end - len(self._bytes), len(self._bytes), _GGUF_BYTES)
            self._bytes += self._fetch(len(self._bytes), len(self._bytes) + n_more)
        content = self._bytes[self._at : end]
        self._at += len(content)
        return content

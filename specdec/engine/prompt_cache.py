"""A file that carries KV caches from one process to the next.

It is a safetensors file with the tokens and their KV of the target and, where there is one, the
draft, under `target.` and `draft.`. KV is valid only for the model that computed it, so the file
has the models' fingerprints: another target's file is refused. Another draft's KV is ignored,
because the output is the same without it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from backends.contract.backend import BackendError
from backends.contract.prefix_cache import PrefixCache
from backends.contract.sequence import SavedTensors, SequenceKV
from offload.errors import SpecdecError
from offload.formats.mapped import MappedFile, TensorShape, read_mapped, write_mapped
from offload.formats.safetensors import read_header_and_metadata
from offload.formats.tensors import CheckpointError
from offload.process.memory import reset_peak_rss
from specdec.models.opened import OpenedModel

_FORMAT = "specdec prompt cache 1"
_TOKENS = "token_ids"
_TARGET, _DRAFT = "target", "draft"
_T = TypeVar("_T")


class PromptCacheError(SpecdecError):
    """A prompt cache file cannot be used or written."""


def fingerprint(model: OpenedModel) -> str:
    """Return the SHA-256, in hex, of the model and its vocabulary."""
    digest = hashlib.sha256(model.source.fingerprint().encode())
    digest.update("\0".join(token or "" for token in model.vocabulary.tokens).encode())
    return digest.hexdigest()


def check_file(path: str | Path) -> None:
    """Raise PromptCacheError if the path cannot be, or is not, a prompt cache. Needs no model.

    A missing file is fine: it is to be written.
    """
    path = Path(path).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else "lies in a folder that is not there"
        raise PromptCacheError(f"the prompt cache file {path} {problem}: name another file")
    if path.exists() and not path.is_file():  # a device or a FIFO, never to be replaced
        raise PromptCacheError(
            f"the prompt cache file {path} is not a regular file: name another file"
        )
    if not os.path.lexists(path):
        return
    try:
        metadata, _ = read_header_and_metadata(path)
    except CheckpointError as error:
        raise _damaged(path, error) from error
    if metadata.get("format") != _FORMAT:
        raise _refusal(path, "it was not written by this version of specdec")


class PromptCache:
    """A prompt cache file, and the models whose KV it may contain.

    Reads and checks the file, if there is one, before the models' weights are loaded.

    Raises:
        PromptCacheError: the path cannot be a file, or it is no prompt cache, damaged, or of
            another target.
    """

    def __init__(self, path: str | Path, target: OpenedModel, draft: OpenedModel | None) -> None:
        self.path = Path(path).expanduser()
        check_file(self.path)
        opened = {_TARGET: target} if draft is None else {_TARGET: target, _DRAFT: draft}
        self._fingerprints = {role: fingerprint(model) for role, model in opened.items()}
        self._in_file: dict[str, list[int]] = {}  # tokens of each model whose KV the file has
        self._file = self._read()

    def _read(self) -> MappedFile | None:
        if not os.path.lexists(self.path):
            return None
        try:
            file = read_mapped(self.path)
        except CheckpointError as error:
            raise _damaged(self.path, error) from error
        if file.metadata.get(_TARGET) != self._fingerprints[_TARGET]:
            raise self._refusal(
                "it belongs to another target model, to other cache types or another --exact or, "
                "where that is exact, to another machine, library or number of threads"
            )
        return file

    def restore(self, target: PrefixCache, draft: PrefixCache | None) -> None:
        """Load the file's KV into the prefix caches, as of a finished sequence; done once.

        Raises PromptCacheError if the file does not fit the model or its KV cannot be saved.
        """
        if not target.backend.can_save_prefix:
            raise PromptCacheError(
                "llama.cpp saves only the last window of a model with a sliding window, and only "
                "the last state of one with recurrent layers, which the next prompt cannot go on "
                "from: run it without a prompt cache file"
            )
        file, self._file = self._file, None
        if file is None:
            return
        both = _by_role(target, draft)
        try:
            with file.unchanged():  # loading took a while
                for role, prefix_cache in both.items():
                    if file.metadata.get(role) == self._fingerprints[role]:
                        self._fill(role, prefix_cache, file)
        except CheckpointError as error:
            raise self._refusal(str(error)) from error
        self._in_file = _newest_tokens(both)
        reset_peak_rss()  # the mapped file counted as this process's memory meanwhile

    def save(self, target: PrefixCache, draft: PrefixCache | None) -> None:
        """Write the KV of the newest sequence, unless the file has it already.

        Raises PromptCacheError and leaves the file unchanged if it cannot be written.
        """
        try:
            with ExitStack() as stack:
                both = _by_role(target, draft).items()
                self._save(
                    {
                        role: stack.enter_context(_at_rest(prefix_cache))
                        for role, prefix_cache in both
                    }
                )
        except BackendError as error:
            raise self._not_written(str(error)) from error

    def _save(self, newest: Mapping[str, SequenceKV | None]) -> None:
        kvs = {role: kv for role, kv in newest.items() if kv is not None}
        tokens = {role: list(kv.committed_ids) for role, kv in kvs.items() if kv.n_committed}
        if tokens == self._in_file or _TARGET not in tokens:
            return
        tensors = []
        for role, token_ids in tokens.items():
            tensors.append(TensorShape(f"{role}.{_TOKENS}", "I32", (len(token_ids),)))
            for tensor in kvs[role].prefix_tensors():
                name = f"{role}.{tensor.name}"
                tensors.append(TensorShape(name, tensor.dtype, tensor.shape))

        def fill(buffers: Mapping[str, memoryview]) -> None:
            for role, token_ids in tokens.items():
                own = _below(role, buffers)
                own.pop(_TOKENS)[:] = np.array(token_ids, dtype="<i4").tobytes()
                kvs[role].save_prefix(own)

        metadata = {role: self._fingerprints[role] for role in tokens}
        try:
            write_mapped(self.path, tensors, {"format": _FORMAT, **metadata}, fill)
        except OSError as error:
            raise self._not_written(f"{error.strerror or error}: name another file") from error
        self._in_file = tokens

    def _fill(self, role: str, prefix_cache: PrefixCache, file: MappedFile) -> None:
        backend = prefix_cache.backend
        token_ids, tensors = self._saved(role, backend.vocab_size, file)
        if len(token_ids) > backend.max_context:
            if role == _DRAFT:
                return  # a shorter window than then
            raise self._refusal(
                f"its {len(token_ids)} tokens do not fit in the context of "
                f"{backend.max_context} (raise --ctx-size)"
            )
        kv = backend.new_sequence()
        try:
            kv.load_prefix(token_ids, tensors)
        except BackendError as error:
            kv.close()
            raise self._refusal(str(error)) from error
        prefix_cache.adopt(kv)

    def _saved(
        self, role: str, vocab_size: int, file: MappedFile
    ) -> tuple[list[int], SavedTensors]:
        """Return the file's tokens and KV tensors of one model."""
        records, buffers = _below(role, file.records), _below(role, file.buffers)
        tokens = records.pop(_TOKENS, None)
        if tokens is None or tokens.dtype != "I32" or len(tokens.shape) != 1 or not tokens.n_bytes:
            raise self._refusal(f"it has no tokens of the {role}")
        ids = np.frombuffer(bytes(buffers.pop(_TOKENS)), dtype="<i4")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise self._refusal(f"it has tokens outside of the {role}'s vocabulary")
        tensors = {
            name: (TensorShape(name, record.dtype, record.shape), buffers[name])
            for name, record in records.items()
        }
        return ids.tolist(), tensors

    def _not_written(self, reason: str) -> PromptCacheError:
        return PromptCacheError(f"cannot write the prompt cache {self.path}: {reason}")

    def _refusal(self, reason: str) -> PromptCacheError:
        return _refusal(self.path, reason)


def _damaged(path: Path, error: CheckpointError) -> PromptCacheError:
    return _refusal(path, str(error).removesuffix("; download it again"))


def _refusal(path: Path, reason: str) -> PromptCacheError:
    return PromptCacheError(
        f"the prompt cache {path} cannot be used: {reason}: remove it, or name another one"
    )


def _by_role(target: PrefixCache, draft: PrefixCache | None) -> dict[str, PrefixCache]:
    if draft is None or not draft.backend.can_save_prefix:
        return {_TARGET: target}
    return {_TARGET: target, _DRAFT: draft}


@contextmanager
def _at_rest(prefix_cache: PrefixCache) -> Iterator[SequenceKV | None]:
    """Yield the newest KV, whose live nodes saving drops: a fork of it if a sequence uses it,
    because its drafter or beams go on with their nodes."""
    newest = prefix_cache.newest
    if newest is None or newest in prefix_cache.cached:
        yield newest
        return
    with closing(newest.fork()) as other:
        yield other


def _newest_tokens(both: Mapping[str, PrefixCache]) -> dict[str, list[int]]:
    """Return the tokens of each model's newest KV, where there is any."""
    tokens = {
        role: list(prefix_cache.newest.committed_ids)
        for role, prefix_cache in both.items()
        if prefix_cache.newest is not None
    }
    return {role: token_ids for role, token_ids in tokens.items() if token_ids}


def _below(role: str, named: Mapping[str, _T]) -> dict[str, _T]:
    """Return the entries named `role.*`, without that prefix."""
    start = f"{role}."
    return {n.removeprefix(start): value for n, value in named.items() if n.startswith(start)}

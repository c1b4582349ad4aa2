"""llama.cpp by its low-level C interface: the library, its log, a model and a context.

Nothing here knows trees or streaming. `llama_cpp` is imported on first use, so that the package
works without it. llama.cpp says why it refuses something only in its log: the last lines of it
become the reason in our errors.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from backends.contract.backend import BackendError
from backends.llama.batch import Batch
from backends.llama.log import LlamaLog
from offload.errors import SpecdecError
from offload.process.interruptible import call_aside

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
"""Types of the KV cache by their number in ggml.h."""
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
_MODEL_FIELDS = "load_mode use_extra_bufts no_alloc n_gpu_layers devices progress_callback"
_CONTEXT_FIELDS = (
    "n_seq_max n_outputs_max kv_unified swa_full cb_eval abort_callback flash_attn_type"
)

Progress = Callable[[int, int], None]


class LlamaError(SpecdecError):
    """llama.cpp is missing, too old, or refused what it was given."""


LOG = LlamaLog()
_KEPT_ALIVE: list[object] = []  # callbacks that llama.cpp holds


@lru_cache(maxsize=1)
def load_library() -> ModuleType:
    """llama_cpp's low-level module. Raises LlamaError where it is missing or too old."""
    # Between two layers the workers of ggml would spin while the pass waits for storage. Read once,
    # when libgomp is loaded; the user's own setting stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import llama_cpp.llama_cpp as library
    except ImportError as error:
        raise LlamaError(
            "GGUF models need llama-cpp-python: pip install 'specdec[gguf]'"
        ) from error
    _check_fields(library.llama_model_params, _MODEL_FIELDS)
    _check_fields(library.llama_context_params, _CONTEXT_FIELDS)
    _KEPT_ALIVE.append(library.llama_log_callback(lambda level, text, _: LOG.write(level, text)))
    _listen(library)
    library.llama_backend_init()
    return library


def _listen(library: Any) -> None:
    """Take llama.cpp's log, of which a process has only one, from whoever had it before."""
    library.llama_log_set(_KEPT_ALIVE[0], None)


def _check_fields(structure: type[ctypes.Structure], wanted: str) -> None:
    missing = set(wanted.split()) - {field[0] for field in structure._fields_}
    if missing:
        raise LlamaError(
            f"this llama-cpp-python has no {structure.__name__}.{min(missing)}: "
            "pip install --upgrade 'specdec[gguf]'"
        )


def llama_version() -> str:
    """Of llama-cpp-python, which brings its llama.cpp along."""
    load_library()
    import llama_cpp

    return str(llama_cpp.__version__)


def default_threads() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LlamaModel:
    """A model that llama.cpp has loaded.

    Args:
        load_mode: "mmap" keeps the file's layout and pages; "ram" reads it into memory of its own,
            in the layouts that are fastest for this processor; "none" allocates nothing, to ask
            what a context would need.
    """

    def __init__(self, path: Path, load_mode: str, progress: Progress | None = None) -> None:
        self.library = library = load_library()
        params = library.llama_model_default_params()
        params.n_gpu_layers = 0
        self._devices = (ctypes.c_void_p * 1)()  # an empty list: no GPU, even where there is one
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        params.load_mode = (
            library.LLAMA_LOAD_MODE_MMAP if load_mode == "mmap" else library.LLAMA_LOAD_MODE_NONE
        )
        params.no_alloc = load_mode == "none"
        params.use_extra_bufts = load_mode == "ram" and not _has_amx(library)
        loading = _Loading(library, path, progress)
        params.progress_callback = loading.callback
        _listen(library)
        LOG.clear()
        self._handle = None
        try:
            loading.run(lambda: self._load(path, params))
        except BaseException:
            self.close()
            raise
        if not self._handle:
            raise LlamaError(f"llama.cpp cannot load {path}: {LOG.reason()}")
        self.vocab_size: int = library.llama_vocab_n_tokens(self._vocab())
        self.sliding_window: int = library.llama_model_n_swa(self._handle)
        self.n_bytes: int = library.llama_model_size(self._handle)
        self.is_recurrent: bool = library.llama_model_is_recurrent(
            self._handle
        ) or library.llama_model_is_hybrid(self._handle)

    def _load(self, path: Path, params: Any) -> None:
        self._handle = self.library.llama_model_load_from_file(os.fsencode(path), params)

    def _vocab(self) -> Any:
        return self.library.llama_model_get_vocab(self._handle)

    @property
    def handle(self) -> Any:
        if not self._handle:
            raise LlamaError("the model is closed; load it again")
        return self._handle

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            self.library.llama_model_free(handle)


def _has_amx(library: ModuleType) -> bool:
    """Whether ggml was built for AMX; GCC 12 drops the stores that configure its tiles."""
    return b"AMX_INT8 = 1" in (library.llama_print_system_info() or b"")


class _Loading:
    """llama.cpp's progress, passed on; an error in it or Ctrl-C ends the loading."""

    def __init__(self, library: ModuleType, path: Path, progress: Progress | None) -> None:
        self._progress, self._n_bytes = progress, path.stat().st_size
        self._error: BaseException | None = None
        self._is_stopped = False
        self.callback = library.llama_progress_callback(self._report)

    def run(self, load: Callable[[], None]) -> None:
        call_aside("specdec-load", load, self._stop)
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        self._is_stopped = True

    def _report(self, share: float, _: object) -> bool:
        try:
            if self._progress is not None:
                self._progress(int(share * self._n_bytes), self._n_bytes)
        except BaseException as error:
            self._error = error
        return self._error is None and not self._is_stopped


@dataclass(frozen=True)
class ContextOptions:
    """What a context is made for; rows are tokens of one pass."""

    n_cells: int  # of the KV cache
    max_rows: int
    max_outputs: int  # rows with logits
    n_sequences: int
    n_threads: int
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool | None = None  # None: where llama.cpp can, as is its default

    def __post_init__(self) -> None:
        for name in (self.cache_type_k, self.cache_type_v):
            if name not in CACHE_TYPES:
                raise ValueError(f"cache type {name!r} is not one of {', '.join(CACHE_TYPES)}")


class LlamaContext:
    """A KV cache and compute buffers for one model.

    Args:
        eval_callback: ggml's callback for every node of a graph (`ggml_backend_sched_eval_callback`
            of the library), or None.
    """

    def __init__(
        self, model: LlamaModel, options: ContextOptions, eval_callback: Any = None
    ) -> None:
        self._model, self._library = model, model.library
        params = self._params(options)
        if eval_callback is not None:
            params.cb_eval = eval_callback
        # ggml asks after each node whether to stop, a thousand times per pass. strlen of one byte
        # answers without taking Python's lock.
        self._stop = ctypes.create_string_buffer(2)
        self.is_stopping = False
        strlen = ctypes.CDLL(None).strlen
        params.abort_callback = ctypes.cast(strlen, self._library.ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(self._stop, ctypes.c_void_p)
        _listen(self._library)
        LOG.clear()
        self._handle: Any = None
        try:
            call_aside("specdec-context", lambda: self._open(params))
        except BaseException:
            self.close()
            raise
        self.log = LOG.lines()
        if not self._handle:
            raise LlamaError(
                f"llama.cpp cannot make a context of {options.n_cells} tokens with a "
                f"{options.cache_type_k}/{options.cache_type_v} cache: {LOG.reason()}"
            )
        self.memory: Any = self._library.llama_get_memory(self._handle)
        self.n_cells: int = self._library.llama_n_ctx(self._handle)

    def _open(self, params: Any) -> None:
        self._handle = self._library.llama_init_from_model(self._model.handle, params)

    def _params(self, options: ContextOptions) -> Any:
        params = self._library.llama_context_default_params()
        params.n_ctx = options.n_cells
        params.n_batch = params.n_ubatch = options.max_rows
        params.n_seq_max = options.n_sequences
        params.n_outputs_max = max(options.max_outputs, options.n_sequences)
        params.n_threads = params.n_threads_batch = options.n_threads
        params.type_k = CACHE_TYPES[options.cache_type_k]
        params.type_v = CACHE_TYPES[options.cache_type_v]
        if options.flash_attention is not None:
            params.flash_attn_type = int(options.flash_attention)
        params.kv_unified = True  # the sequences of a tree share the cells of their prefix
        params.swa_full = True  # so that a rollback never needs what was thrown away
        params.offload_kqv = params.op_offload = False
        return params

    def decode(self, batch: Batch) -> int:
        """Run one pass; returns 0, or 2 where it was stopped. Raises BackendError otherwise."""
        LOG.clear()
        code = self._library.llama_decode(self.handle, batch.as_struct(self._library))
        if code not in (0, 2):
            raise BackendError(f"llama.cpp could not run {batch.n_tokens} tokens: {LOG.reason()}")
        return code

    def logits(self, n_rows: int, vocab_size: int) -> np.ndarray:
        """A copy of the last pass's logits, float32 [n_rows, vocab], in the batch's order."""
        if n_rows == 0:
            return np.zeros((0, vocab_size), dtype=np.float32)
        pointer = self._library.llama_get_logits(self.handle)
        if not pointer:
            raise BackendError("llama.cpp has no logits of the last pass")
        return np.ctypeslib.as_array(pointer, (n_rows, vocab_size)).astype(np.float32, copy=True)

    def request_stop(self, stop: bool = True) -> None:
        """Let a running pass end after the node that it is at; any thread may call it."""
        self.is_stopping = stop
        self._stop[0] = b"\1" if stop else b"\0"

    @contextmanager
    def stopping_at_once(self) -> Iterator[None]:
        """A pass inside ends after its first node."""
        self._stop[0] = b"\1"
        try:
            yield
        finally:
            self._stop[0] = b"\1" if self.is_stopping else b"\0"

    @property
    def handle(self) -> Any:
        if not self._handle:
            raise LlamaError("the context is closed; load the model again")
        return self._handle

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            self._library.llama_free(handle)

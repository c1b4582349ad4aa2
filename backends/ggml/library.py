"""llama.cpp through its low-level C interface: the library, its log and a model.

`llama_cpp` is imported on first use, so that the package works without it. llama.cpp reports why it
refuses something only in its log: its last lines become the reason in our errors.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from offload.distribution import install_command
from offload.errors import SpecdecError
from offload.process.openmp import LLAMA_SPINS, bounded_spinning
from offload.process.signals import delayed_interrupt
from offload.units import Progress

_MODEL_FIELDS = "load_mode use_extra_bufts no_alloc n_gpu_layers devices progress_callback"
_CONTEXT_FIELDS = (
    "n_seq_max n_outputs_max kv_unified swa_full cb_eval abort_callback flash_attn_type"
)
_MISSING = f"GGUF models need llama-cpp-python: {install_command('gguf')}"
_INFO, _ERROR, _CONTINUED = 2, 4, 5  # ggml_log_level


class LlamaError(SpecdecError):
    """llama.cpp is missing, too old, or refuses a model or an option."""


class LlamaLog:
    """The last lines that llama.cpp logged, of level INFO and above."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=400)
        self._partial: tuple[int, str] = (_INFO, "")
        self._lock = threading.Lock()
        self._listeners: dict[int, Callable[[str], object]] = {}

    def write(self, level: int, text: bytes | None) -> None:
        with self._lock:
            before, start = self._partial
            if level == _CONTINUED:
                level = before
            *lines, partial = (start + (text or b"").decode("utf-8", "replace")).split("\n")
            self._partial = (level, partial)
            self._lines.extend((level, line.strip()) for line in lines if level >= _INFO)
        listener = self._listeners.get(threading.get_ident())
        if listener is not None:
            for line in lines:
                listener(line)

    @contextmanager
    def heard_by(self, listener: Callable[[str], object]) -> Iterator[None]:
        """Call `listener` with each line that llama.cpp logs in this thread."""
        thread = threading.get_ident()
        self._listeners[thread] = listener
        try:
            yield
        finally:
            del self._listeners[thread]

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()

    def lines(self, level: int = _INFO) -> list[str]:
        with self._lock:
            return [line for its_level, line in self._lines if its_level >= level and line]

    def reason(self) -> str:
        """Return the last errors in one line; llama.cpp logs a cause before its consequences."""
        return "; ".join(self.lines(_ERROR)[-3:]) or "no reason was logged"


LOG = LlamaLog()
_KEPT_ALIVE: list[object] = []  # callbacks that llama.cpp has pointers to


@lru_cache(maxsize=1)
def load_library() -> ModuleType:
    """Return llama_cpp's low-level module. Raises LlamaError if it is missing or too old."""
    silence_backtraces()
    try:
        with bounded_spinning(LLAMA_SPINS):
            import llama_cpp.llama_cpp as library
    except ImportError as error:
        raise LlamaError(_MISSING) from error
    _check_fields(library.llama_model_params, _MODEL_FIELDS)
    _check_fields(library.llama_context_params, _CONTEXT_FIELDS)
    _KEPT_ALIVE.append(library.llama_log_callback(lambda level, text, _: LOG.write(level, text)))
    listen(library)
    with delayed_interrupt():
        library.llama_backend_init()
    return library


def silence_backtraces() -> None:
    """Keep ggml from starting a debugger as it ends the process: its output would go to stdout.

    The user's own setting stands.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")


@cache
def is_installed() -> bool:
    """Return whether llama-cpp-python is installed, without importing it."""
    return find_spec("llama_cpp") is not None


def load_shared_library() -> ctypes.CDLL:
    """Load libllama without the rest of llama-cpp-python, which takes ten times as long.

    ggml's libraries come with libllama: a wheel has them under three names, and another name than
    llama.cpp's own would load them a second time, with settings of their own.
    Raises LlamaError if it is missing.
    """
    silence_backtraces()
    with bounded_spinning(LLAMA_SPINS):
        return ctypes.CDLL(str(library_folder() / "libllama.so"))


def library_folder() -> Path:
    """Return the folder of llama.cpp's shared libraries. Raises LlamaError if it is missing."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise LlamaError(_MISSING)
    return Path(spec.origin).parent / "lib"


def listen(library: Any) -> None:
    """Set the callback of llama.cpp's log; a process has only one."""
    library.llama_log_set(_KEPT_ALIVE[0], None)


def _check_fields(structure: type[ctypes.Structure], names: str) -> None:
    missing = set(names.split()) - {field[0] for field in structure._fields_}
    if missing:
        raise LlamaError(
            f"this llama-cpp-python has no {structure.__name__}.{min(missing)}: "
            "pip install --upgrade llama-cpp-python"
        )


def llama_version() -> str:
    """Return the version of llama-cpp-python, which includes its own llama.cpp."""
    load_library()
    import llama_cpp

    return str(llama_cpp.__version__)


class LlamaModel:
    """A model that llama.cpp has loaded.

    Args:
        load_mode: "mmap" maps the file; "ram" reads it into memory, in the layouts that are fastest
            for this processor; "none" allocates nothing, to ask for the memory of a context.
        is_repacked: False keeps the file's layout in "ram", too.
        stand_ins: files that llama.cpp is to open instead of the model's, one for each.
        has_head: whether to load the model's MTP head, too.
    """

    def __init__(
        self,
        path: Path,
        load_mode: str,
        progress: Progress | None = None,
        *,
        is_repacked: bool = True,
        stand_ins: Sequence[Path] = (),
        has_head: bool = False,
    ) -> None:
        self.library = library = load_library()
        params = library.llama_model_default_params()
        params.n_gpu_layers = 0
        self._devices = (ctypes.c_void_p * 1)()  # an empty list: no GPU, even where there is one
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        params.load_mode = (
            library.LLAMA_LOAD_MODE_MMAP if load_mode == "mmap" else library.LLAMA_LOAD_MODE_NONE
        )
        params.no_alloc = load_mode == "none"
        params.load_mtp = has_head
        is_repacked = is_repacked and load_mode == "ram"
        params.use_extra_bufts = is_repacked and not _has_amx(library)
        loading = _Loading(library, path, progress)
        params.progress_callback = loading.callback
        listen(library)
        LOG.clear()
        self._handle = None
        try:
            loading.run(lambda: self._load(path, stand_ins, params))
        except BaseException:
            self.close()
            raise
        if not self._handle:
            raise LlamaError(
                f"llama.cpp cannot load {path}: {LOG.reason()}: the file is damaged (download it "
                "again), or of a kind that this llama.cpp does not know (update llama-cpp-python)"
            )
        self.vocab_size: int = library.llama_vocab_n_tokens(self._vocab())
        self.sliding_window: int = library.llama_model_n_swa(self._handle)
        self.n_bytes: int = library.llama_model_size(self._handle)
        self.is_recurrent: bool = library.llama_model_is_recurrent(
            self._handle
        ) or library.llama_model_is_hybrid(self._handle)

    def _load(self, path: Path, stand_ins: Sequence[Path], params: Any) -> None:
        if not stand_ins:
            self._handle = self.library.llama_model_load_from_file(os.fsencode(path), params)
            return
        names = (ctypes.c_char_p * len(stand_ins))(*map(os.fsencode, stand_ins))
        self._handle = self.library.llama_model_load_from_splits(names, len(names), params)

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
    """Return whether ggml has AMX, which GCC 12 miscompiles: it drops stores of the tile config."""
    return b"AMX_INT8 = 1" in (library.llama_print_system_info() or b"")


class _Loading:
    """Calls `progress` from llama.cpp; an exception in it, or Ctrl-C, ends the loading and is
    raised after it.

    ctypes would lose an exception in a callback.
    """

    def __init__(self, library: ModuleType, path: Path, progress: Progress | None) -> None:
        self._progress, self._n_bytes = progress, path.stat().st_size
        self._error: BaseException | None = None
        self._interrupts: Sequence[int] = ()
        self.callback = library.llama_progress_callback(self._report)

    def run(self, load: Callable[[], None]) -> None:
        with delayed_interrupt() as self._interrupts:
            load()
        if self._error is not None:
            raise self._error

    def _report(self, share: float, _: object) -> bool:
        try:
            if self._progress is not None:
                self._progress(int(share * self._n_bytes), self._n_bytes)
        except BaseException as error:
            self._error = error
        return self._error is None and not self._interrupts

"""Destination of a trained draft: a folder that has the unfinished training until it is complete.

DIR/training/settings.json     options that a continued training must share
DIR/training/generated/        output of the target
    DIR/training/traces/           the target's distributions on the text
DIR/training/checkpoint.pt     weights and optimiser, of the last minute
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offload.errors import SpecdecError
from offload.units import format_bytes
from specdec.traces.format import INDEX, read_index
from specdec.training.options import TrainError

_OF_STEPS = ("epochs", "learning_rate")
"""Settings that may change before the first step, when there are traces alone."""
_WORK, _SETTINGS = "training", "settings.json"


class Destination:
    """Folder of a draft. Raises TrainError if it cannot be written, or has something else."""

    def __init__(self, folder: str | Path) -> None:
        try:
            self.folder = Path(folder).expanduser().absolute()
            self.work = self.folder / _WORK
            has_content = self.folder.is_symlink() or (
                self.folder.exists() and any(self.folder.iterdir())
            )
            if has_content and not (self.work / _SETTINGS).is_file():
                raise TrainError(f"{folder} is there already: name another folder, or remove it")
            above = next(path for path in self.folder.parents if path.exists())
        except NotADirectoryError as error:
            raise TrainError(f"{folder} is there already: name another folder") from error
        except (OSError, RuntimeError) as error:
            raise _cannot_write(folder, error) from error
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise TrainError(f"cannot write {folder}: {above} cannot be written: name another one")

    @property
    def traces(self) -> Path:
        return self.work / "traces"

    @property
    def generated(self) -> Path:
        return self.work / "generated"

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    @property
    def n_traced(self) -> int:
        """Sequences that the target has scored so far."""
        return _n_sequences(self.traces)

    @contextmanager
    def work_of(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Make the folder, or check that an unfinished training has the same settings.

        A block that fails before there is anything to continue leaves nothing behind.

        Raises TrainError.
        """
        path = self.work / _SETTINGS
        values = json.loads(json.dumps(settings))
        missing = [above for above in (self.folder, *self.folder.parents) if not above.exists()]
        try:
            if path.is_file():
                self._compare(path, values)
            self.work.mkdir(parents=True, mode=0o700, exist_ok=True)
            path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        try:
            yield
        except BaseException:
            n_sequences = self.n_traced + _n_sequences(self.generated)
            if n_sequences == 0 and not self.checkpoint.exists():
                shutil.rmtree(self.work, ignore_errors=True)
                with suppress(OSError):
                    for made in missing:
                        made.rmdir()
            raise

    def _compare(self, path: Path, settings: Mapping[str, Any]) -> None:
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            free = () if self.checkpoint.exists() else _OF_STEPS
            compared = [name for name in settings if name not in free]
            different = [name for name in compared if earlier.get(name) != settings[name]]
        except (OSError, ValueError, AttributeError) as error:
            raise TrainError(f"{path} cannot be read: remove {self.folder}") from error
        if different:
            name = different[0]
            raise TrainError(
                f"{self.folder} has an unfinished training with another {name} "
                f"({earlier.get(name)}, now {settings[name]}): give the same options to continue "
                "it, remove it, or name another folder"
            )

    def check_space(self, n_bytes: int) -> None:
        """Raise TrainError where the disk lacks space."""
        free = shutil.disk_usage(self.work).free
        if n_bytes > free:
            raise TrainError(
                f"training takes {format_bytes(n_bytes)} in {self.folder} and "
                f"{format_bytes(free)} are free: free some space, name a folder elsewhere, or "
                "lower --max-tokens"
            )

    def forget_weights(self) -> None:
        """Remove the checkpoint; the traces stay."""
        self.checkpoint.unlink(missing_ok=True)

    def complete(self, save: Callable[[Path], None]) -> None:
        """Let `save` write the draft's files, move them to the folder, remove the training."""
        result = self.work / "result"
        try:
            shutil.rmtree(result, ignore_errors=True)
            result.mkdir()
            save(result)
            paths = sorted(result.iterdir(), key=lambda path: path.name == "config.json")
            for path in paths:  # the config last: without it there is no model
                path.chmod(0o644)
                path.replace(self.folder / path.name)
            shutil.rmtree(self.work)
        except SpecdecError:
            raise
        except Exception as error:  # safetensors raises its own for a full disk
            raise _cannot_write(self.folder, error) from error


def _n_sequences(folder: Path) -> int:
    return read_index(folder).n_sequences if (folder / INDEX).exists() else 0


def _cannot_write(folder: str | Path, error: Exception) -> TrainError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return TrainError(f"cannot write {folder}: {reason}: name another folder")

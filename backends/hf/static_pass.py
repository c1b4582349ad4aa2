"""Passes of fixed shapes, which a GPU can record once and replay (CUDA graphs).

A small draft model's pass over one level of a tree is hundreds of short kernels, each of which has
to be started. A recorded pass is started as one. It must have the same shapes and addresses every
time, so its inputs are buffers, a level is padded to the next power of two of rows, and attention
goes over more keys than there are, the rest behind the mask:

    rows   [ the level's nodes | padding: sees nothing, its KV lies where the next rows will ]
    keys   [ prefix | live nodes | this level | padding, hidden ]

For models whose weights all stay on the device, and whose code looks at no number while it runs.
What is recorded how is the `Recorder`'s business (backends/cuda/graphs.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from backends.contract.backend import BackendError
from backends.cuda.graphs import Recorder, Replay
from backends.hf.attention import SEGMENTED
from backends.hf.cache import TreeCache, whole_blocks
from backends.hf.config import has_length_dependent_rope
from backends.hf.forward import run_model, set_state
from backends.hf.layer_runner import LayerRunner
from backends.hf.masks import PassLayout, Segment, SegmentedMask
from backends.hf.model import HfModel
from backends.hf.weights import RawTensors

MAX_STATIC_ROWS = 256
"""Wider levels are no matter of short kernels."""
_FEWEST_ROWS = 8
_FEWEST_KEYS = 512


class StaticState:
    """What `LayerRunner` asks of a pass, for one whose masks are buffers (see PassState)."""

    def __init__(self, masks: dict[int | None, SegmentedMask], n_rows: int) -> None:
        self.chunk_rows = n_rows
        self._masks = masks

    def mask(self, start: int, end: int, window: int | None) -> SegmentedMask:
        return self._masks[window]

    def check_cancel(self) -> None:
        """There is one chunk."""

    def alibi(self, end: int) -> None:
        return None


class _StaticPass:
    """The buffers of one shape, and the pass over them."""

    def __init__(
        self,
        n_rows: int,
        n_keys: int,
        windows: Collection[int | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.token_ids = torch.zeros((1, n_rows), dtype=torch.long, device=device)
        self.positions = torch.zeros((1, n_rows), dtype=torch.long, device=device)
        self.cache_rows = torch.zeros(n_rows, dtype=torch.long, device=device)
        self._additive = {
            window: torch.zeros((1, 1, n_rows, n_keys), dtype=dtype, device=device)
            for window in windows
        }
        masks = {
            window: SegmentedMask((Segment(0, n_keys, mask),), n_keys)
            for window, mask in self._additive.items()
        }
        self.state = StaticState(masks, n_rows)
        self.replay: Replay | None = None

    def fill(self, token_ids: Sequence[int], layout: PassLayout) -> None:
        """Set the inputs of the next replay."""
        n_new, n_rows = len(token_ids), self.cache_rows.shape[0]
        n_before = layout.prefix + layout.first_new
        _set(self.token_ids[0], np.asarray(token_ids, dtype=np.int64))
        _set(self.positions[0], layout.new_positions)
        _set(self.cache_rows, n_before + np.arange(n_rows, dtype=np.int64))
        for window, mask in self._additive.items():
            allowed = np.zeros(mask.shape[2:], dtype=bool)
            allowed[:n_new, : n_before + n_new] = layout.allowed(0, n_new, window)
            hidden = torch.from_numpy(~allowed).to(mask.device)
            # See backends.hf.masks on why not the most negative value.
            mask[0, 0].zero_().masked_fill_(hidden, torch.finfo(mask.dtype).min / 2)


def has_static_passes(model: HfModel) -> bool:
    """Whether attention takes segments, and nothing goes by how long the text is."""
    return model.attention == SEGMENTED and not has_length_dependent_rope(model.config)


def static_rows(n_rows: int) -> int:
    """Rows of the pass that a level of `n_rows` is padded to."""
    return _power_of_two(n_rows, _FEWEST_ROWS)


def static_shapes(max_rows: int) -> list[int]:
    """Rows of all passes that levels of at most `max_rows` may be padded to, the widest last."""
    shapes = [_FEWEST_ROWS]
    while shapes[-1] < min(max_rows, MAX_STATIC_ROWS):
        shapes.append(2 * shapes[-1])
    return shapes


def static_keys(n_rows: int, most_rows: int) -> int:
    """Keys that attention goes over where the cache will hold `n_rows` rows, of `most_rows` ever.

    A whole number of blocks of the cache, which is what kernels want the masks' rows to be.
    """
    n_keys = min(_power_of_two(n_rows, _FEWEST_KEYS), most_rows + MAX_STATIC_ROWS)
    return whole_blocks(max(n_rows, n_keys))


class StaticPasses:
    """Runs levels of a tree through one model and its cache in recorded passes.

    Args:
        cache: of the model; room is made in it before a pass, never during one.
        runners: of the model's layers.
        most_rows: that the cache will ever hold; attention never goes over many more keys.

    Raises BackendError for a model that is streamed, or whose attention needs whole masks.
    """

    def __init__(
        self,
        model: HfModel,
        cache: TreeCache,
        runners: Sequence[LayerRunner],
        most_rows: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        if not self.can_serve(model, runners):
            raise BackendError(
                f"passes of {model.config.model_type} cannot be recorded: its weights must stay on "
                "the device, its attention take segments, and its positions not go by the length"
            )
        self._model, self._cache, self._runners = model, cache, runners
        self._most_rows = most_rows
        self._windows = frozenset(model.window(i) for i in range(len(runners)))
        self._device = device
        self._recorder = recorder
        self._n_keys = 0
        self._n_moves = 0
        self._passes: dict[int, _StaticPass] = {}

    @staticmethod
    def can_serve(model: HfModel, runners: Sequence[LayerRunner]) -> bool:
        """Whether all weights stay on the device, and the model's passes have fixed shapes."""
        return has_static_passes(model) and all(runner.is_resident for runner in runners)

    def can_run(self, layout: PassLayout) -> bool:
        """Whether the pass is a level, on weights that are all in their modules by now."""
        is_level = 0 < layout.n_new <= MAX_STATIC_ROWS and layout.prefix > 0
        return is_level and all(runner.is_bound for runner in self._runners)

    @property
    def n_recorded(self) -> int:
        """Shapes that are recorded now."""
        return len(self._passes)

    def run(self, token_ids: Sequence[int], layout: PassLayout) -> torch.Tensor:
        """Append the new rows to the cache; logits [n, vocab] of them.

        Only for what `can_run` is true of. The next run writes over the logits.
        """
        n_rows = static_rows(len(token_ids))
        self._make_room(layout.prefix + layout.first_new + n_rows)
        static = self._passes.get(n_rows)
        if static is None:
            static = self._passes[n_rows] = _StaticPass(
                n_rows, self._n_keys, self._windows, self._model.dtype, self._device
            )
        static.fill(token_ids, layout)
        if static.replay is None:
            static.replay = self._recorder.record(lambda: self._run(static))
        logits = static.replay()
        self._cache.appended(len(token_ids))
        return logits[: len(token_ids)]

    def forget(self) -> None:
        """Drop all recordings, as when the cache's memory is given back."""
        self._passes.clear()
        self._recorder.forget()
        self._n_keys = 0

    def _run(self, static: _StaticPass) -> torch.Tensor:
        set_state(self._runners, static.state, _hold_layer)
        with self._cache.writing_at(static.cache_rows, self._n_keys):
            return run_model(self._model, self._cache, static.token_ids, static.positions, 0)

    def _make_room(self, n_rows: int) -> None:
        """Recordings hold addresses: where the cache moves or outgrows their keys, they go."""
        n_keys = max(self._n_keys, static_keys(n_rows, self._most_rows))
        self._cache.reserve(n_keys)
        if n_keys == self._n_keys and self._cache.n_moves == self._n_moves:
            return
        self.forget()
        self._cache.clear_unused()
        self._n_keys, self._n_moves = n_keys, self._cache.n_moves


@contextmanager
def _hold_layer(index: int) -> Iterator[RawTensors]:
    """Of a layer whose module has its weights for good."""
    yield {}


def _set(buffer: torch.Tensor, values: np.ndarray) -> None:
    """The first entries of a buffer; what follows is padding, whose values do not matter."""
    buffer[: len(values)].copy_(torch.from_numpy(values))


def _power_of_two(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())

"""StreamedLayers: a llama.cpp model whose layers are read from storage in every pass.

llama.cpp has mapped the file; a `Pager` reads each layer into its addresses while the graph uses
it. ggml calls back before each node of the graph and, if asked to, after it. The last nodes of
layers are found from a graph recorded beforehand: a pass that is stopped at its first node is
enough, because ggml asks about all nodes first.

    ask 0, 1, ... k    k is the last node that reads a tensor of layer i: "call me after it"
    compute 0 .. k     layer i is in memory
    called after k     release layer i, wait for layer i + 1
    ask k + 1 ...

In a mixture whose experts are read on demand, ggml also calls back after the node that chooses
experts: missing ones are read (`PagedExperts`) before the products that follow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from backends.contract.backend import TransferStats
from backends.ggml.layer_outputs import LayerOutputs
from backends.ggml.library import LlamaError, LlamaModel
from backends.gguf.heads import head_records, resident_head_records
from backends.gguf.model import GgufModel
from backends.llama.batch import Batch
from backends.llama.cells import check_lengths
from backends.llama.context import LlamaContext
from backends.llama.graph import (
    GraphReader,
    GraphRecord,
    PassSchedule,
    check_one_split,
    chosen_experts,
)
from backends.llama.passes import QUICK_HANDOVER, PassCancelled
from backends.llama_states.state_inputs import StateInputs
from offload.experts.cached import keep_decay
from offload.experts.readers import ExpertStats
from offload.formats.tensors import TensorRecord
from offload.paging.address_space import MappedRange, find_mapping, give_back_zeros
from offload.paging.expert_pages import outside
from offload.paging.experts import PagedExperts
from offload.paging.pager import Pager
from offload.paging.rows import RowsInPlace
from offload.placement.placement import Placement
from offload.storage.reading import DEFAULT_N_READERS
from offload.units import Progress


class StreamedLayers:
    """Reads the layers of one loaded model in step with its passes.

    `callback` is for the context; `start` then takes the layers out of memory. `mapped_before` are
    the `mapped_ranges` before the model was loaded: the same file may be open more than once.
    Experts are read one by one if `placement` has an expert cache, else as a part of the layers.
    `outputs` takes outputs of layers, which a draft head asks for, and `inputs` what recurrent
    layers put into their states.
    """

    def __init__(
        self,
        loaded: LlamaModel,
        model: GgufModel,
        placement: Placement,
        mapped_before: Collection[tuple[Path, MappedRange]],
        *,
        has_head: bool = False,
        outputs: LayerOutputs | None = None,
        inputs: StateInputs | None = None,
    ) -> None:
        self._library = loaded.library
        self._model, self._layers, self._expert_plan = model, placement.layers, placement.experts
        self._head = tuple(head_records(model)) if has_head else ()
        self._streamed = [i for i, layer in enumerate(self._layers) if layer.streamed]
        added = mapped_ranges(model) - set(mapped_before)
        self._mappings = {
            path: [mapped for its_path, mapped in added if its_path == path]
            for path in model.index.paths
        }
        self._graph = GraphReader(self._library, self._layer_ranges(), self._expert_ranges())
        self._schedules: dict[tuple[int, int], PassSchedule] = {}
        self._pager: Pager | None = None
        self._experts: PagedExperts | None = None
        self.has_hung_reads = False
        """After `close`: a read still writes to the model's addresses, so they must stay mapped."""
        self._embedding: list[RowsInPlace] = []
        """Readers of the embedding's rows; empty if all of it is in memory."""
        self._caches: set[tuple[int, int]] = set()
        """(address, bytes) of the KV caches; some architectures have two."""
        self._recording: GraphRecord | None = None
        self._outputs, self._inputs = outputs, inputs
        self._schedule_now = PassSchedule(0, {}, {}, {})
        """Schedule of the running pass."""
        self._taken: frozenset[int] = frozenset()
        """Nodes of the running pass to take states' inputs at."""
        self._n_asked = 0
        self._error: BaseException | None = None
        self._batch: Batch | None = None
        """Batch of the running pass."""
        self.callback = self._library.ggml_backend_sched_eval_callback(self._on_node)

    def _layer_ranges(self) -> Iterator[tuple[int, int, int]]:
        for i, layer in enumerate(self._layers):
            for record in layer.tensors:
                start = _address(self._mappings, record)
                yield start, start + record.n_bytes, i

    def _expert_ranges(self) -> Iterator[tuple[int, int, int]]:
        for i, experts in enumerate(self._expert_plan.layers if self._expert_plan else ()):
            if experts is not None:
                for first, last in zip(experts.tensors[0], experts.tensors[-1], strict=True):
                    start = _address(self._mappings, first)
                    yield start, start + last.offset + last.n_bytes - first.offset, i

    def start(
        self, context: LlamaContext, n_slots: int, n_readers: int | None, progress: Progress | None
    ) -> None:
        """Record a graph, then page the layers.

        Raises UnsupportedModel or LlamaError if this model or library cannot be streamed.
        """
        check_one_split(context.log)
        self._context = context
        self._scratch = self._library.llama_n_seq_max(context.handle) - 1
        self._schedule(1, 1)
        for address, n_bytes in self._caches:
            give_back_zeros(address, n_bytes)  # zeroed by llama.cpp; memory follows use
        non_layer = self._model.resident_non_layer_records
        resident = {record.name for record in non_layer}
        untouched = [r for r in self._model.non_layer_records if r.name not in resident]
        of_head = resident_head_records(self._head)
        beside = outside(self._expert_plan.layers if self._expert_plan else ())
        self._pager = Pager(
            self._layers,
            [*non_layer, *of_head, *beside.resident],
            self._mappings,
            n_slots,
            untouched=[
                *untouched,
                *(r for r in self._model.mtp_records if r not in of_head),
                *beside.untouched,
            ],
            n_readers=n_readers or DEFAULT_N_READERS,
            progress=progress,
        )
        if self._expert_plan is not None:
            self._experts = PagedExperts(self._expert_plan, self._mappings, n_readers=n_readers)
        embeddings = [*untouched, *(r for r in self._head if r not in of_head)]
        for record in embeddings:
            address = _address(self._mappings, record)
            self._embedding.append(RowsInPlace(record, address, self._pager.resident_ranges))

    @property
    def use(self) -> TransferStats:
        if self._pager is None:
            return TransferStats()
        experts = ExpertStats() if self._experts is None else self._experts.stats
        return TransferStats.of(self._pager.stats, experts)

    @property
    def unread_bytes(self) -> int:
        parts = (self._pager, self._experts)
        return sum(part.unread_bytes for part in parts if part is not None)

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._pager is None else self._pager.pinned_bytes

    def set_pinned_bytes(self, n_bytes: int) -> None:
        if self._pager is not None:
            self._pager.set_pinned_bytes(n_bytes)

    def decode(self, batch: Batch) -> int:
        """Run one pass; return 0, or 2 if it was stopped. Re-raise errors of the callback."""
        schedule = self._schedule(batch.n_tokens, batch.n_outputs)
        self._schedule_now = schedule
        self._n_asked, self._error, self._batch = 0, None, batch
        self._taken = frozenset()
        if self._inputs is not None:
            self._inputs.begin(batch.rollback_start, schedule.n_state_parts)
            if batch.rollback_start is not None:
                self._taken = schedule.states
        self._advance(0, self._streamed[0] if self._streamed else None)
        self._prefetch_experts(0, batch, {})
        self.read_embeddings(batch.token_ids)
        with QUICK_HANDOVER:
            code = self._context.decode(batch)
        if self._error is not None:
            raise self._error
        if code == 0 and self._context.is_stopping:
            return 2
        if code == 0 and self._n_asked != schedule.n_nodes:
            raise RuntimeError(
                f"llama.cpp ran a graph of {self._n_asked} nodes instead of {schedule.n_nodes}"
            )
        return code

    def read_embeddings(self, token_ids: Sequence[int]) -> None:
        """Read the rows of these tokens, in place of those of the last pass, of embeddings that are
        not in memory: for a pass of this model, or of its draft head."""
        for embedding in self._embedding:
            embedding.read(token_ids)

    def forget_graphs(self) -> None:
        """Record graphs anew, after a change of the context."""
        self._schedules.clear()

    def restart(self) -> None:
        """Restart the ring at layer 0 after a failed pass."""
        if self._pager is not None:
            self._pager.restart()

    def close(self) -> None:
        """Stop the readers. The model may be freed only afterwards."""
        if self._experts is not None and self._expert_plan is not None:
            self.has_hung_reads = not self._experts.close()
            keep_decay(self._expert_plan, self._experts.stats)
        if self._pager is not None:
            self._pager.close()
        for embedding in self._embedding:
            embedding.close()

    # --- inside a pass ---------------------------------------------------------------------

    def _on_node(self, tensor: int, ask: bool, _: object) -> bool:
        """Handle ggml's callback; store errors, since ctypes would lose them and the pass go on."""
        schedule = self._schedule_now
        if ask:
            number = self._n_asked
            self._n_asked = number + 1
            if self._recording is None:
                return schedule.calls_back_after(number) or number in self._taken
        try:
            if ask:
                if self._recording is not None and self._error is None:
                    self._recording.add(tensor)
                return False
            number = self._n_asked - 1
            if number in schedule.outputs and self._outputs is not None:
                self._outputs.take(schedule.outputs[number], tensor)
            if number in self._taken and self._inputs is not None:
                self._inputs.take(tensor)
            if number in schedule.routers:
                assert self._batch is not None
                self._fetch_experts(schedule.routers[number], tensor, self._batch)
            if number in schedule.ends:
                return self._leave_layer(schedule.ends[number])
        except BaseException as error:
            self._error = error
            return False
        return True

    def _fetch_experts(self, layer: int, tensor: int, batch: Batch) -> None:
        """Read the chosen experts; padding tokens take the first token's, to save their reads."""
        assert self._experts is not None
        assert self._expert_plan is not None
        ids = chosen_experts(tensor)
        own = self._expert_plan.layers[layer]
        n_experts = len(own.tensors) if own is not None else 0
        if ids.size and not 0 <= ids.min() <= ids.max() < n_experts:
            raise LlamaError(
                f"llama.cpp chose experts {ids.min()} to {ids.max()} of the {n_experts} of layer "
                f"{layer}: use --load-mode mmap"
            )
        ids[batch.first_filler(len(ids)) :] = ids[:1]
        in_use = np.unique(ids).tolist()
        self._experts.fetch(layer, in_use, self._check_stop)
        self._prefetch_experts(layer + 1, batch, {layer: in_use})

    def _prefetch_experts(
        self, layer: int, batch: Batch, in_use: Mapping[int, Collection[int]]
    ) -> None:
        """Begin to read the experts of the next layer from `layer` on that has some, where as many
        tokens as a prompt's are likely to ask for all of them."""
        if self._experts is None or self._expert_plan is None:
            return
        later = enumerate(self._expert_plan.layers[layer:], start=layer)
        number, own = next(((i, x) for i, x in later if x is not None), (layer, None))
        is_last = number == len(self._layers) - 1  # only tokens with logits are computed there
        num_tokens = len(batch.requested) if is_last else batch.n_tokens - batch.n_fillers
        if own is not None and num_tokens and own.n_hit(num_tokens) >= len(own.tensors):
            self._experts.prefetch(number, in_use, self._check_stop)

    def _leave_layer(self, layer: int) -> bool:
        """Go from a layer to the next streamed one; return whether the pass is to continue."""
        assert self._pager is not None
        self._pager.leave(layer)
        if self._context.is_stopping:
            return False
        position = self._streamed.index(layer) + 1
        is_last = position == len(self._streamed)
        self._advance(layer + 1, None if is_last else self._streamed[position])
        return True

    def _advance(self, layer: int, to: int | None) -> None:
        """Wait for layer `to` (None: end the pass), after resident ones from `layer` on."""
        assert self._pager is not None
        for resident in range(layer, len(self._layers) if to is None else to):
            self._pager.enter(resident)
            self._pager.leave(resident)
        if to is not None:
            self._pager.enter(to, self._check_stop)

    def _check_stop(self) -> None:
        if self._context.is_stopping:
            raise PassCancelled

    # --- before a pass ---------------------------------------------------------------------

    def _schedule(self, n_tokens: int, n_outputs: int) -> PassSchedule:
        """Return the schedule of the graph of such a batch; record the graph the first time."""
        key = (n_tokens, n_outputs)
        if key not in self._schedules:
            plan = self._expert_plan
            mixed = [i for i, x in enumerate(plan.layers) if x] if plan else ()
            record = self._record_graph(n_tokens, n_outputs)
            self._schedules[key] = record.schedule(self._layers, mixed)
            self._caches |= record.caches
        return self._schedules[key]

    def _record_graph(self, n_tokens: int, n_outputs: int) -> GraphRecord:
        """Return the record of a graph, from a scratch pass that is stopped at once."""
        rows = range(n_tokens - n_outputs, n_tokens)
        batch = Batch([0] * n_tokens, range(n_tokens), [[self._scratch]] * n_tokens, rows)
        record = GraphRecord(self._graph, self._outputs)
        self._recording, self._n_asked, self._error = record, 0, None
        try:
            with self._context.stopping_at_once():
                code = self._context.decode(batch)
            if self._error is not None:
                raise self._error
        finally:
            self._recording = None
        if code != 2:
            raise LlamaError("llama.cpp ran a pass that it was told to stop: use --load-mode mmap")
        check_lengths(self._library, self._context.memory, {self._scratch: 0})
        return record


def mapped_ranges(model: GgufModel) -> set[tuple[Path, MappedRange]]:
    """Return where the model's files are mapped now, by any backend."""
    return {(path, mapped) for path in model.index.paths for mapped in find_mapping(path)}


def _address(mappings: Mapping[Path, Sequence[MappedRange]], record: TensorRecord) -> int:
    """Return the address of a tensor. Raises LlamaError if its file is not mapped there."""
    for mapped in mappings[record.path]:
        offset = record.offset - mapped.file_offset
        if offset >= 0 and offset + record.n_bytes <= mapped.n_bytes:
            return mapped.address + offset
    raise LlamaError(f"llama.cpp has not mapped {record.name} of {record.path}: it cannot be paged")

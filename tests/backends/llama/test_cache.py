"""Any history of extends, commits, prunes and rollbacks on llama.cpp equals a fresh prefill."""

import numpy as np
import pytest
from alone import own
from gguf_models import save_tiny_gguf
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backends.contract.backend import PREFIX, BackendError, ContextFull
from backends.gguf.model import load_gguf_model
from backends.llama.backend import LlamaBackend

pytestmark = pytest.mark.gguf

TOLERANCE = 5e-4
"""Tolerance relative to the largest logit. Chunks of other lengths round differently (at most
4e-5 seen, on an ill-conditioned prompt); reading a wrong cell changes a row by 0.01 or more."""
CONTEXT, MAX_NODES = 60, 20


def make_backend(model, **options):
    """Use a float32 cache and plain attention: their rounding is independent of a pass's rows."""
    options = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False, **options}
    return LlamaBackend(
        model, max_context=CONTEXT, max_nodes=MAX_NODES, n_threads=1, load_mode="mmap", **options
    )


class KvMachine(RuleBasedStateMachine):
    """A backend checked against plain lists of tokens."""

    backend: LlamaBackend  # one for all examples, each starting from the last one's state
    fresh: LlamaBackend  # computes every expected row from scratch
    window: int

    @initialize(prompt=st.lists(st.integers(3, 95), min_size=1, max_size=8))
    def begin(self, prompt):
        own(self.backend).rollback(0)
        self.token_ids = list(prompt)
        self.live = {}  # node id -> tokens from the prefix on
        self.check(own(self.backend).prefill(prompt), self.token_ids)

    def check(self, logits, tokens):
        own(self.fresh).rollback(0)
        expected = own(self.fresh).prefill(tokens)
        scale = max(1.0, float(np.abs(expected).max()))
        assert np.abs(logits - expected).max() <= TOLERANCE * scale

    def refusal(self, paths):
        """Return the error that adding these nodes must raise, if any."""
        depth = max(len(tokens) for tokens in [*paths.values(), *self.live.values()])
        if len(self.live) + len(paths) > MAX_NODES or 0 < self.window <= depth:
            return BackendError
        return ContextFull if len(self.token_ids) + depth > CONTEXT else None

    @rule(data=st.data(), n=st.integers(1, 8))
    def extend(self, data, n):
        first, parents, tokens, paths = own(self.backend).next_node_id, [], [], {}
        for i in range(n):
            parent = data.draw(st.sampled_from([PREFIX, *self.live, *paths]))
            token = data.draw(st.integers(3, 95))
            parents.append(parent)
            tokens.append(token)
            above = {**self.live, **paths}.get(parent, ())
            paths[first + i] = (*above, token)
        error = self.refusal(paths)
        if error:
            with pytest.raises(error):
                own(self.backend).extend(tokens, parents)
            self.live = {}
            return
        rows = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n))
        ids, logits = own(self.backend).extend(tokens, parents, rows)
        assert ids == list(paths)
        assert logits.shape == (len(rows), self.backend.vocab_size)
        self.live.update(paths)
        at = data.draw(st.integers(0, len(rows) - 1))
        self.check(logits[at], self.token_ids + list(paths[ids[rows[at]]]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data):
        end = data.draw(st.sampled_from(list(self.live)))
        tokens = self.live[end]
        path = self.ids_on_path(end)
        children = [n for n in self.live if self.ids_on_path(n)[:-1] == path]
        keep = [n for n in children if data.draw(st.booleans())]
        cached = [n for n in self.live if set(keep) & set(self.ids_on_path(n))]
        own(self.backend).commit(path, keep)
        self.token_ids += tokens
        self.live = {n: self.live[n][len(tokens) :] for n in cached}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def keep_some_without_committing(self, data):
        roots = [n for n in self.live if len(self.live[n]) == 1]
        keep = [n for n in roots if data.draw(st.booleans())]
        cached = [n for n in self.live if set(keep) & set(self.ids_on_path(n))]
        own(self.backend).commit([], keep)
        self.live = {n: self.live[n] for n in cached}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def prune(self, data):
        doomed = data.draw(st.lists(st.sampled_from(list(self.live)), min_size=1, max_size=3))
        gone = [n for n in self.live if set(doomed) & set(self.ids_on_path(n))]
        own(self.backend).prune(doomed)
        self.live = {n: t for n, t in self.live.items() if n not in gone}

    @rule(data=st.data())
    def rollback(self, data):
        length = data.draw(st.integers(0, len(self.token_ids)))
        own(self.backend).rollback(length)
        self.token_ids, self.live = self.token_ids[:length], {}

    @rule(tokens=st.lists(st.integers(3, 95), min_size=1, max_size=5))
    def prefill(self, tokens):
        self.live = {}
        if len(self.token_ids) + len(tokens) > CONTEXT:
            with pytest.raises(ContextFull):
                own(self.backend).prefill(tokens)
            return
        self.token_ids += tokens
        self.check(own(self.backend).prefill(tokens), self.token_ids)

    @rule(data=st.data(), tokens=st.lists(st.integers(3, 95), min_size=1, max_size=5))
    def cut_to_another_sequence(self, data, tokens):
        """Another sequence, which may share a prefix with the present one."""
        n_shared = data.draw(st.integers(0, len(self.token_ids)))
        expected = (self.token_ids[:n_shared] + tokens)[:CONTEXT]
        lacking = own(self.backend).cut_to(expected)
        assert 0 < len(lacking) <= max(len(expected) - n_shared, 1)
        logits = own(self.backend).prefill(lacking)
        self.token_ids, self.live = expected, {}
        self.check(logits, expected)

    @precondition(lambda self: self.live)
    @rule()
    def commit_of_no_chain_drops_the_live_nodes(self):
        with pytest.raises(BackendError, match="not a live node"):
            own(self.backend).commit([own(self.backend).next_node_id])
        self.live = {}

    def ids_on_path(self, node):
        return own(self.backend).store.table.path(node)

    @invariant()
    def lengths_are_exact(self):
        if hasattr(self, "token_ids"):
            assert list(own(self.backend).committed_ids) == self.token_ids
            assert set(own(self.backend).store.table.ids) == set(self.live)
            inner = {node for n in self.live for node in self.ids_on_path(n)[:-1]}
            ends = own(self.backend).store._ends.values()
            assert sorted(ends) == sorted(set(self.live) - inner)  # at most one sequence per leaf
            own(self.backend).store.check_integrity()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3moe"])
def test_any_history_equals_a_fresh_prefill(family, tmp_path):
    model = load_gguf_model(save_tiny_gguf(family, tmp_path / "m.gguf", n_layers=2))
    with make_backend(model) as backend, make_backend(model) as fresh:
        window = backend._model.sliding_window
        members = {"backend": backend, "fresh": fresh, "window": window}
        run_state_machine_as_test(
            type("Machine", (KvMachine,), members),
            settings=settings(
                max_examples=25,
                stateful_step_count=15,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize(
    ("cache_type_k", "cache_type_v"), [("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q4_0")]
)
def test_quantized_cache(cache_type_k, cache_type_v, tmp_path):
    """Commit, prune and rollback move no cell: a row's values stay, bit for bit."""
    model = load_gguf_model(save_tiny_gguf("llama", tmp_path / "m.gguf"))
    options = {"cache_type_k": cache_type_k, "cache_type_v": cache_type_v, "flash_attention": None}
    with make_backend(model, **options) as backend:
        own(backend).prefill([3, 17, 5, 60, 41])
        ids, _ = own(backend).extend([7, 8, 9, 10], [PREFIX] * 4)
        _, before = own(backend).extend([20, 21], [ids[1], ids[3]])
        own(backend).prune([ids[0], ids[2]])
        own(backend).commit([ids[3]])
        _, after = own(backend).extend([21], [PREFIX])
        scale = max(1.0, float(np.abs(before).max()))
        assert np.abs(before[1] - after[0]).max() <= 2e-3 * scale
        own(backend).rollback(5)
        ids, _ = own(backend).extend([10], [PREFIX])
        _, again = own(backend).extend([21], ids)
        assert np.abs(before[1] - again[0]).max() <= 2e-3 * scale

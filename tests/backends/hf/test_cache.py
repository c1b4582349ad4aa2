"""Any history of extends, commits, prunes and rollbacks equals a fresh prefill."""

from pathlib import Path

import numpy as np
import pytest
from alone import own
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

from backends.contract.backend import PREFIX, ContextFull
from backends.hf.backend import TorchBackend

TOLERANCE = 2e-5
CONTEXT = 160


class KvMachine(RuleBasedStateMachine):
    """A backend checked against plain lists of tokens."""

    directory: Path
    fresh: TorchBackend  # computes every expected row from scratch

    @initialize(prompt=st.lists(st.integers(3, 95), min_size=1, max_size=130))
    def begin(self, prompt):
        self.backend = TorchBackend.resident(self.directory, max_context=CONTEXT)
        self.token_ids = list(prompt)
        self.live = {}  # node id -> tokens from the prefix on
        self.check(own(self.backend).prefill(prompt), self.token_ids)

    def check(self, logits, tokens):
        own(self.fresh).rollback(0)
        expected = own(self.fresh).prefill(tokens)
        scale = max(1.0, float(np.abs(expected).max()))
        assert np.abs(logits - expected).max() <= TOLERANCE * scale

    @rule(data=st.data(), n=st.integers(1, 6))
    def extend(self, data, n):
        first, parents, tokens, paths = own(self.backend).next_node_id, [], [], {}
        for i in range(n):
            parent = data.draw(st.sampled_from([PREFIX, *self.live, *paths]))
            token = data.draw(st.integers(3, 95))
            parents.append(parent)
            tokens.append(token)
            above = {**self.live, **paths}.get(parent, ())
            paths[first + i] = (*above, token)
        if len(self.token_ids) + max(map(len, paths.values())) > CONTEXT:
            with pytest.raises(ContextFull):
                own(self.backend).extend(tokens, parents)
            self.live = {}
            return
        ids, logits = own(self.backend).extend(tokens, parents)
        assert ids == list(paths)
        self.live.update(paths)
        row = data.draw(st.integers(0, n - 1))
        self.check(logits[row], self.token_ids + list(paths[ids[row]]))

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
    def prune(self, data):
        doomed = data.draw(st.sampled_from(list(self.live)))
        gone = [n for n in self.live if doomed in self.ids_on_path(n)]
        own(self.backend).prune([doomed])
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

    def ids_on_path(self, node):
        return own(self.backend).store.table.path(node)

    @invariant()
    def lengths_are_exact(self):
        if hasattr(self, "backend"):
            assert list(own(self.backend).committed_ids) == self.token_ids
            own(self.backend).store.check_integrity()

    def teardown(self):
        if hasattr(self, "backend"):
            self.backend.close()


@pytest.mark.parametrize("family", ["llama", "bloom", "minicpm3", "mistral"])
def test_any_history_equals_a_fresh_prefill(family, checkpoint_factory):
    directory = checkpoint_factory(family)
    with TorchBackend.resident(directory) as fresh:
        machine = type("Machine", (KvMachine,), {"directory": directory, "fresh": fresh})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=18,
                stateful_step_count=12,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

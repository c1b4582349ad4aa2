"""Mistakes in a text's decoder and the model drafter: whole rounds on tables catch every one."""

from __future__ import annotations

import sys

import pytest
from controller_checks import CHECKS
from mutants import mutated

from offload.errors import SpecdecError
from specdec.decoding.rounds.text_decoder import TextDecoder
from specdec.drafters.model import ModelDrafter


def mutant(kind: type, old: str, new: str) -> type:
    """The class made anew from its module's source, with one place changed."""
    changed: type = getattr(mutated(sys.modules[kind.__module__], old, new), kind.__name__)
    return changed


IN_CONTROLLER = {
    "commit: the last accepted token left out": (
        "node_ids[i] for i in acceptance.path]",
        "node_ids[i] for i in acceptance.path[:-1]]",
    ),
    "commit: the pending token left out": (
        "node_ids[i] for i in acceptance.path]",
        "node_ids[i] for i in acceptance.path[1:]]",
    ),
    "commit: the first nodes of the tree, not those of the path": (
        "node_ids[i] for i in acceptance.path]",
        "node_ids[i] for i in range(len(acceptance.path))]",
    ),
    "context: not extended by the bonus": (
        "self.context.extend(tokens)",
        "self.context.extend(tokens[:-1])",
    ),
    "context: only the bonus": ("self.context.extend(tokens)", "self.context.append(tokens[-1])"),
    "a bonus after a rejection, too": (
        "tokens = acceptance.emitted(tree)",
        "tokens = acceptance.emitted(tree) + ((), (int(logits[-1].argmax()),))"
        "[not acceptance.is_bonus]",
    ),
    "tree: every node hangs on the root": ("else first + parent", "else first"),
    "tree: parents off by one": ("else first + parent", "else first + max(parent - 1, 0)"),
    "prefix: without the pending token": ("[*self.context, *tree", "[*self.context[:-1], *tree"),
    "prefix: without the path": (
        "[*self.context, *tree.tokens_on_path(node)]",
        "list(self.context)",
    ),
    "match: the row of the parent": (
        "logits.__getitem__)",
        "lambda node: logits[max(tree.parents[node], 0)])",
    ),
    "match: the row of the next node": (
        "logits.__getitem__)",
        "lambda node: logits[min(node + 1, len(tree) - 1)])",
    ),
    "rejection: the row of the parent": (
        "node), logits[node])",
        "node), logits[max(tree.parents[node], 0)])",
    ),
    "rejection: always the last row": ("node), logits[node])", "node), logits[-1])"),
    "rejection: p before its processors": (
        "self._sampler.probs(self._prefix(tree, node), logits[node])",
        "np.exp(logits[node].astype(np.float64))",
    ),
}
IN_DRAFTER = {
    "KV: the last accepted token is missing": (
        "rows_to(view)",
        "rows_to([*view[:-2], *view[-1:]])",
    ),
    "KV: the first token is missing": (
        "rows_to(view)",
        "rows_to(view[1:])",
    ),
    "KV: the pending token is computed twice": (
        "rows_to(view)",
        "rows_to([*view, view[-1]])",
    ),
    "chain: q before its processors": (
        "draft_probs=q)",
        "draft_probs=np.exp(row.astype(np.float64)))",
    ),
    "chain: q of the row before": (
        "draft_probs=q)",
        "draft_probs=tree.draft_probs[index] if index else q)",
    ),
    "chain: q is not handed on": ("draft_probs=q)", "draft_probs=None)"),
    "chain: the likeliest token, with q as if drawn": (
        "sample_index(q, rng.random())",
        "int(q.argmax())",
    ),
    "chain: every node below the prefix": (
        "[token], [_live_id(parent)])",
        "[token], [-1])",
    ),
    "chain: the processors do not see the drafted tokens": ("prefix.append(token)", "pass"),
    "ahead: the subtree is kept without its KV": ("commit(path, keep=below)", "commit(path)"),
    "ahead: the outcome is not committed": (
        "self._sequence.commit(path, keep=below)",
        "self._sequence.commit(path[:-1])",
    ),
    "ahead: the tree goes on from the last accepted node": (
        "move_to(run[-1])",
        "move_to(run[-2] if len(run) > 1 else self._tree.root)",
    ),
    "ahead: the tree goes on from where it was": ("self._tree.move_to(run[-1])", "pass"),
    "ahead: a miss is taken for a hit": (
        "if len(path) < len(emitted):",
        "if not path:",
    ),
    "ahead: nodes below the wrong parent": (
        "is None else parent.node_id for parent, _ in level",
        "is None else -1 for parent, _ in level",
    ),
    "ahead: candidates of the neighbour": (
        "ranked = self._ranker.rank(scores.logits, places,",
        "ranked = self._ranker.rank(np.roll(scores.logits, 1, axis=0), places,",
    ),
}


def is_caught(decoder: type[TextDecoder], drafter: type[ModelDrafter]) -> bool:
    """By a wrong result, by the checks of the caches and of proposals, or by `run`'s on the
    committed length."""
    for check in CHECKS:
        try:
            if not check(decoder, drafter):
                return True
        except (SpecdecError, AssertionError, ValueError):  # a mutant has a BadProposal of its own
            return True
    return False


@pytest.mark.parametrize("name", IN_CONTROLLER)
def test_mutant_of_the_controller_is_caught(name: str) -> None:
    assert is_caught(mutant(TextDecoder, *IN_CONTROLLER[name]), ModelDrafter)


@pytest.mark.parametrize("name", IN_DRAFTER)
def test_mutant_of_the_drafter_is_caught(name: str) -> None:
    assert is_caught(TextDecoder, mutant(ModelDrafter, *IN_DRAFTER[name]))

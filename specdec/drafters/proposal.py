"""Check a drafter's proposal: an invalid tree would end the step of all sequences that share it."""

from __future__ import annotations

from offload.errors import SpecdecError
from specdec.verification.tree import ROOT, DraftTree


class BadProposal(SpecdecError):
    """A drafter proposed a tree that cannot be verified."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the drafter proposed {what}: see specdec.drafters.base.Drafter.propose")


def check_proposal(
    tree: object, pending_id: int, *, max_nodes: int, max_depth: int, vocab_size: int
) -> None:
    """Raise BadProposal for a tree that no forward pass can verify.

    Args:
        pending_id: the last token of the context, which the tree's root must be.
        max_nodes: maximum nodes of the tree, the root included.
        vocab_size: size of the sampler's vocabulary.
    """
    if not isinstance(tree, DraftTree):
        raise BadProposal(f"{tree!r}, which is no DraftTree")
    if tree.token_ids[ROOT] != pending_id:
        raise BadProposal(
            f"a tree with the root {tree.token_ids[ROOT]}, but the context ends with {pending_id}"
        )
    if len(tree) > max_nodes or max(tree.depths) > max_depth:
        raise BadProposal(
            f"{tree.n_drafted} tokens in {max(tree.depths)} levels, but the limits are "
            f"{max_nodes - 1} in {max_depth}"
        )
    if min(tree.token_ids) < 0 or max(tree.token_ids) >= vocab_size:
        raise BadProposal(f"tokens that are not among the {vocab_size} of the vocabulary")

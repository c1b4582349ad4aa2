"""Self-test: whether torch is batch-invariant on this machine. The results are cached on disk.

A row of a product is one sum for each output, and the library chooses the order of its terms. Most
libraries have special kernels for one row or a few, and give a row the same bits from some number
of rows on. So the test computes products with the model's numbers of terms for few rows and for
many, with a row at different places; attention with the nodes of a tree together and one by one;
and elementwise functions at the end of a tensor, where torch runs another loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from backends.attention.batch import BatchLayout
from backends.attention.blocked_mask import blocked_mask
from backends.attention.blocks import USUAL_LIMITS, ProductLimits
from backends.attention.layout import CausalLayout, PassLayout
from backends.attention.row_groups import BLOCK_KEYS
from backends.checkpoint.config import HeadShape
from backends.contract.cached_checks import CachedChecks
from backends.contract.exactness import Exactness
from backends.feedforward.linear import library_of, tried_linear_of
from backends.hf.model import HfModel
from backends.hf.products import Product, UnknownProduct, products_of
from backends.hf.threads import threads_of_pass
from offload.process.cpus import thread_counts

CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
"""Values of `min_batch_tokens` for a pass, and row counts for the products of attention."""
_COUNTS = (101, 64, 63, 33, 32, 17, 16, 15, 12, 9, 8, 7, 5, 4, 3, 2, 1)
_NUM_TOKENS = 128
_SMALL_BIAS = 1e-7
"""Scale of a bias: as small as the rounding errors of cancelling terms, so as not to hide them."""
_FEW_TERMS = 64
"""Sums of at most this many terms are often equal in any order, so more rows are tried."""
_MANY_PLACES = 16
_FEW = (2, 3, 5, 7, 29)
_TRIED_KV_HEADS = 4
"""Maximum number of KV heads to try: heads are products of one batch and computed alike, except
that a batch of one or two is divided among threads in another way."""
_MAX_KEYS = (192, 128, 64)
_PREFIX, _N_NODES = 2 * BLOCK_KEYS + 10, _MAX_KEYS[0] - 10
"""Number of nodes: with all of them in the prefix's last block, one product has its maximum of
keys."""


@dataclass(frozen=True)
class TorchExactness(Exactness):
    """Exactness of torch on a CPU."""

    limits: ProductLimits = USUAL_LIMITS
    """Limits of the attention's products."""


def find_exactness(model: HfModel, n_threads: int) -> TorchExactness:
    """Test the shapes of a model on this machine, or read the result from the disk cache.

    n_threads: maximum number of threads of a pass.
    """
    if not model.takes_blocks:
        kind = model.config.model_type
        return TorchExactness(False, f"{kind} computes attention in code of its own")
    libraries = f"torch {torch.__version__} {library_of(model.dtype)}"
    with threads_of_pass(n_threads, follows_load=False):
        for counts in dict.fromkeys([thread_counts(n_threads), (n_threads,)]):
            checks = CachedChecks(f"{libraries} {counts} threads", CANDIDATES)
            try:
                exactness = _find(model, checks, counts)
            except UnknownProduct as error:
                return TorchExactness(False, str(error))
            finally:
                checks.save()
            if exactness.is_exact:
                return replace(exactness, is_thread_invariant=1 in counts)
    return exactness


def _find(model: HfModel, checks: CachedChecks, threads: Sequence[int]) -> TorchExactness:
    """threads: thread counts that passes may have, each of which is tested."""
    dtype = model.dtype
    num_tokens = 1
    for product in sorted(set(products_of(model))):
        used = torch.float32 if product.is_float32 else dtype
        name = f"{used} {astuple(product)}"
        min_rows = checks.find(name, partial(min_batch_tokens_of_product, product, used, threads))
        if min_rows is None:
            return TorchExactness(
                False,
                f"on this machine, products with {product.n_in} terms in {dtype} "
                "depend on the other rows of a pass",
            )
        num_tokens = max(num_tokens, min_rows)
    by_shape = [find_limits(_fewer_heads(shape), checks, threads) for shape in model.head_shapes]
    known = [limits for limits in by_shape if limits is not None]
    if len(known) < len(by_shape):
        return TorchExactness(False, "on this machine, sums over keys depend on other keys")
    limits = ProductLimits(
        max((item.min_batch_tokens for item in known), default=USUAL_LIMITS.min_batch_tokens),
        min((item.max_keys for item in known), default=USUAL_LIMITS.max_keys),
    )
    if checks.find("functions", functions_are_batch_invariant) is None:
        return TorchExactness(False, "on this machine, exp() depends on an element's place")
    return TorchExactness(True, min_batch_tokens=num_tokens, limits=limits)


def min_batch_tokens_of_product(
    product: Product, dtype: torch.dtype, threads: Sequence[int] = ()
) -> int | None:
    """Return the number of rows from which a product is batch-invariant; None if there is none.

    threads: thread counts to try; empty: torch's current one.
    """
    generator = torch.Generator().manual_seed(product.n_in)
    n_out = product.n_out
    weight, rows = _terms_that_cancel(n_out, product.n_in, generator, dtype)
    bias = None
    if product.has_bias:
        bias = (_SMALL_BIAS * torch.randn(n_out, generator=generator)).to(dtype)
    transposed = weight.T.contiguous()
    linear = nn.functional.linear if product.is_torch else tried_linear_of(dtype)

    def run(start: int, num_tokens: int) -> torch.Tensor:
        x = rows[start : start + num_tokens]
        if product.is_left:
            return (weight @ x[None].transpose(1, 2))[0].T
        if product.is_transposed:
            return torch.addmm(transposed.new_zeros(n_out) if bias is None else bias, x, transposed)
        return linear(x[None], weight, bias)[0]

    with _restored_threads():
        return _min_tokens(run, _MANY_PLACES if product.n_in <= _FEW_TERMS else 1, threads)


def _terms_that_cancel(
    n_out: int, n_in: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weight [n_out, n_in], rows [_NUM_TOKENS, n_in]) whose products sum terms and the same
    terms with the opposite sign, at random places.

    Only rounding errors are left of such a sum, so another order of the terms gives another result
    even in bf16. With other sums, bf16 shows the difference in one of ten thousand cases.
    """
    half = n_in // 2
    places = torch.randperm(n_in, generator=generator)
    first, second = places[:half], places[half : 2 * half]
    weight, rows = torch.zeros(n_out, n_in), torch.zeros(_NUM_TOKENS, n_in)
    terms = torch.randn(n_out, half, generator=generator)
    weight[:, first] = weight[:, second] = terms
    terms = torch.randn(_NUM_TOKENS, half, generator=generator)
    rows[:, first], rows[:, second] = terms, -terms
    return weight.to(dtype), rows.to(dtype)


def _min_tokens(
    run: Callable[[int, int], torch.Tensor], n_places: int, threads: Sequence[int]
) -> int | None:
    """Return the smallest candidate from which `run` is batch-invariant; None if there is none.

    run: (start, n) -> results [n, ...] of rows start .. start + n - 1, computed together.
    n_places: number of places at which each number of rows is tried.
    """
    with torch.inference_mode():
        expected, n_bad = run(0, _NUM_TOKENS), 0
        # Largest count first: once it differs, smaller ones need no test.
        for i, num_tokens in enumerate(_COUNTS):
            for place in (p for p in range(i, i + n_places) for _ in _in_turn(threads)):
                start = 37 * place % (_NUM_TOKENS - num_tokens + 1)
                outputs = run(start, num_tokens)
                if not torch.equal(outputs, expected[start : start + num_tokens]):
                    n_bad = max(n_bad, num_tokens)
                    break
            if n_bad >= CANDIDATES[-1]:
                return None
    return next(n for n in CANDIDATES if n > n_bad)


def _in_turn(threads: Sequence[int]) -> Iterator[int]:
    """Set torch to each number of threads in turn, for the body of a loop."""
    for n_threads in threads or (torch.get_num_threads(),):
        torch.set_num_threads(n_threads)
        yield n_threads


@contextmanager
def _restored_threads() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _fewer_heads(shape: HeadShape) -> HeadShape:
    n_kv_heads = min(shape.n_kv_heads, _TRIED_KV_HEADS)
    n_heads = shape.n_heads // shape.n_kv_heads * n_kv_heads
    return replace(shape, n_heads=n_heads, n_kv_heads=n_kv_heads)


def find_limits(
    shape: HeadShape, checks: CachedChecks, threads: Sequence[int] = ()
) -> ProductLimits | None:
    """Return the limits of the attention's products; None if nodes of a tree differ with any."""
    for max_keys in _MAX_KEYS:
        name = f"attention {astuple(shape)} {max_keys}"
        min_batch_tokens = checks.find(
            name, partial(min_batch_tokens_of_attention, shape, max_keys, threads)
        )
        if min_batch_tokens is not None:
            return ProductLimits(min_batch_tokens, max_keys)
    return None


def min_batch_tokens_of_attention(
    shape: HeadShape, max_keys: int, threads: Sequence[int] = ()
) -> int | None:
    """Return the smallest batch-invariant row count for at most `max_keys` keys, or None."""
    generator = torch.Generator().manual_seed(shape.key_dim)
    n_keys = _PREFIX + _N_NODES
    query = torch.randn(1, shape.n_heads, _N_NODES, shape.key_dim, generator=generator)
    key = torch.randn(1, shape.n_kv_heads, n_keys, shape.key_dim, generator=generator)
    value = torch.randn(1, shape.n_kv_heads, n_keys, shape.value_dim, generator=generator)
    tree = _bushy_tree()

    def run(layout: PassLayout, nodes: slice, keys: torch.Tensor, min_count: int) -> torch.Tensor:
        limits = ProductLimits(min_count, max_keys)
        mask = blocked_mask(BatchLayout.of(layout), 0, layout.n_new, None, limits)
        own_key, own_value = key.index_select(2, keys), value.index_select(2, keys)
        return mask.attend(query[:, :, nodes], own_key, own_value, scale=0.1)[0]

    with _restored_threads(), torch.inference_mode():
        for min_count in CANDIDATES[2:]:
            together = run(tree, slice(None), torch.arange(n_keys), min_count)
            parts = [(slice(n), _first_nodes(tree, n)) for n in _FEW]
            parts += [(slice(row, row + 1), _alone(tree, row)) for row in range(0, _N_NODES, 25)]
            if all(
                torch.equal(run(layout, nodes, keys, min_count), together[nodes])
                for _ in _in_turn(threads)
                for nodes, (layout, keys) in parts
            ):
                return min_count
    return None


def _bushy_tree() -> PassLayout:
    """Build a random tree with both deep paths and siblings."""
    rng = np.random.default_rng(0)
    visible, depths = np.eye(_N_NODES, dtype=bool), np.zeros(_N_NODES, dtype=np.int64)
    limit = BLOCK_KEYS - 1 - _PREFIX % BLOCK_KEYS
    for node in range(1, _N_NODES):
        parent = int(rng.integers(-1, node))
        if parent >= 0 and depths[parent] < limit:
            visible[node] |= visible[parent]
            depths[node] = depths[parent] + 1
    return PassLayout(_PREFIX, _PREFIX + depths, visible)


def _first_nodes(tree: PassLayout, n: int) -> tuple[PassLayout, torch.Tensor]:
    """Return (a pass over the tree's first n nodes, its keys)."""
    n_keys = tree.prefix + n
    layout = PassLayout(tree.prefix, tree.node_positions[:n], tree.visible[:n, :n])
    return layout, torch.arange(n_keys)


def _alone(tree: PassLayout, row: int) -> tuple[PassLayout, torch.Tensor]:
    """Return (a pass over one node alone, the keys on its path)."""
    path = torch.from_numpy(np.flatnonzero(tree.visible[row])) + tree.prefix
    keys = torch.cat([torch.arange(tree.prefix), path])
    return CausalLayout(len(keys) - 1, 1), keys


def functions_are_batch_invariant() -> int | None:
    """Return 1 if elementwise functions do not depend on a number's place in a tensor, else None.

    Functions that do depend on it, such as silu, get whole vectors only: see elementwise.py.
    """
    x = 4 * torch.randn(512, generator=torch.Generator().manual_seed(0))
    for function in (torch.exp, torch.tanh, torch.cos, torch.sin):
        whole = function(x)
        for n in (1, 3, 7, 13, 31):
            parts = torch.cat([function(part.clone()) for part in x[: 16 * n].split(n)])
            if not torch.equal(parts, whole[: 16 * n]):
                return None
    return 1

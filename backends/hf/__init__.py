"""Checkpoints on transformers and torch: one pass over a streamed model."""

from offload.process.openmp import TORCH_SPINS, bounded_spinning

with bounded_spinning(TORCH_SPINS):  # before anything else of this package imports torch
    import torch  # noqa: F401

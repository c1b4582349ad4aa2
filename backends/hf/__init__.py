"""The torch backend: Hugging Face checkpoints on transformers, with streamed layers."""

from offload.process.openmp import TORCH_SPINS, bounded_spinning

with bounded_spinning(TORCH_SPINS):  # before anything else of this package imports torch
    import torch  # noqa: F401

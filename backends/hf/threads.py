"""How many threads torch computes with."""

from __future__ import annotations

import torch

from offload.process.cpus import usable_cpus


def use_threads(n_threads: int | None) -> None:
    """Let torch compute with so many; None: as it does, within what the process may use."""
    torch.set_num_threads(n_threads or min(torch.get_num_threads(), usable_cpus()))

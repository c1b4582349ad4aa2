"""Machines of a cluster, and whether the specdec and the model of one are those of a command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.cluster.connection import ClusterError
from specdec.models.names import is_hub_id, resolve_model
from specdec.models.weight_files import weights_fingerprint
from specdec.run_options import RunOptions
from specdec.text.chat_format import NAMED


@dataclass(frozen=True)
class Machine:
    """One node of a Ray cluster."""

    node_id: str
    name: str
    n_cpus: int

    def actor_options(self, n_cpus: int, *, is_soft: bool) -> dict[str, Any]:
        """Return Ray's options of an actor here, which is not started again by itself.

        is_soft: whether it may run elsewhere once this machine is gone.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self.node_id, soft=is_soft)
        return {"num_cpus": n_cpus, "scheduling_strategy": here, "max_restarts": 0}


def machines_of(ray: Any) -> list[Machine]:
    """Return the machines of a cluster that have a processor. Raises ClusterError for none."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        raise ClusterError("the Ray cluster has no machine with a processor: see `ray status`")
    return [
        Machine(node["NodeID"], node["NodeManagerHostname"], int(node["Resources"]["CPU"]))
        for node in nodes
    ]


def with_absolute_paths(load: RunOptions) -> RunOptions:
    """Return options whose paths are absolute, for workers have another working directory; names
    stay."""
    names = ("model", "draft_model", "chat_template")
    given = {name: getattr(load, name) for name in names}
    paths: dict[str, Any] = {
        name: Path(value).absolute()
        for name, value in given.items()
        if value is not None and value not in NAMED and Path(value).exists()
    }
    if load.prompt_cache_dir is not None:
        paths["prompt_cache_dir"] = Path(load.prompt_cache_dir).absolute()
    return replace(load, **paths)


def shared_fingerprint(model: str | Path) -> str | None:
    """Return the fingerprint of a model's weights; None for a hub model that only other machines
    may have."""
    return None if is_hub_id(model) else weights_fingerprint(resolve_model(model))


def check_same(version: str, model: str | Path, weights: str | None, shown: str) -> None:
    """Check that this machine has the specdec and the weights of the command that uses it.

    weights: see `shared_fingerprint`. shown: the model's name as it was given.

    Raises ClusterError.
    """
    if version != __version__:
        raise ClusterError(
            f"this machine has specdec {__version__}, the command was begun by {version}: install "
            "the same version"
        )
    if weights is None:
        return
    fingerprint = weights_fingerprint(resolve_model(model))
    if fingerprint != weights:
        raise ClusterError(
            f"{shown} has the weights {fingerprint} on this machine, the command was begun with "
            f"{weights}: copy the model here"
        )

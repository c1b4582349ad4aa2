"""Removing a model from the hub's cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from backends.contract.backend import one_line
from specdec.models.local_models import OLLAMA_PREFIX
from specdec.models.names import ModelNotFound
from specdec.pair import PAIR_PREFIX

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy


@dataclass(frozen=True)
class CachedModel:
    """A model in the hub's cache. n_bytes: bytes that removing it frees."""

    name: str
    n_bytes: int
    _strategy: DeleteCacheStrategy

    def remove(self) -> None:
        """Remove the model. Raises ModelNotFound where the cache cannot be written."""
        try:
            self._strategy.execute()
        except OSError as error:
            raise ModelNotFound(f"{self.name} cannot be removed: {one_line(error)}") from error


def cached_model(name: str) -> CachedModel:
    """Return all revisions of a repository in the hub's cache, as one model.

    Raises ModelNotFound for a name that is not in the cache.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    if name.startswith(OLLAMA_PREFIX):
        own = name.removeprefix(OLLAMA_PREFIX)
        raise ModelNotFound(f"{name} is Ollama's to remove: `ollama rm {own}`")
    if name.startswith(PAIR_PREFIX):
        raise ModelNotFound(f"{name} comes with specdec: there is nothing to remove")
    repository, _, file = name.partition(":")
    if file:
        raise ModelNotFound(
            f"a repository is removed with all its files: `specdec rm {repository}`"
        )
    try:
        cache = scan_cache_dir()
    except CacheNotFound as error:
        raise ModelNotFound(f"the hub's cache has no model {name}: it is empty") from error
    repos = [repo for repo in cache.repos if repo.repo_type == "model" and repo.repo_id == name]
    if not repos:
        raise ModelNotFound(
            f"the hub's cache has no model {name}: `specdec models` lists what it has; remove "
            "other files with the program that keeps them"
        )
    own = replace(cache, repos=frozenset(repos))  # copies of a repository have the same commits
    strategy = own.delete_revisions(*(revision.commit_hash for revision in repos[0].revisions))
    return CachedModel(name, strategy.expected_freed_size, strategy)

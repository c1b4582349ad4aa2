"""Ray as far as `specdec serve --ray` uses it, with actors in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace
from typing import Any


class FakeRay:
    """The parts of Ray that an engine needs: its actors are objects of this process."""

    def __init__(self, *nodes: str) -> None:
        self.exceptions = SimpleNamespace(RayActorError=RuntimeError)
        self.alive, self.killed, self._pool = list(nodes), [], ThreadPoolExecutor(4)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "NodeManagerHostname": name, "Alive": True, "Resources": {"CPU": 1.0}}
            for name in self.alive
        ]

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=partial(self._new, kind)))

    def _new(self, kind: type) -> Any:
        actor = kind()
        calls = {
            name: SimpleNamespace(remote=partial(self._pool.submit, getattr(actor, name)))
            for name in ("start", "read", "write")
        }
        return SimpleNamespace(**calls)

    def wait(self, futures: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done, pending = wait(futures, timeout)
        return list(done), list(pending)

    def get(self, future: Any) -> Any:
        return future.result(60)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

"""Connection to a Ray cluster, which runs or is started on this machine alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from offload.distribution import install_command
from offload.errors import SpecdecError
from offload.units import MIB

AUTO = "auto"
_OBJECT_STORE_BYTES = 80 * MIB
"""Object store size, near Ray's minimum: messages are small, and its default is 1/3 of the
memory."""
_CONNECT_SECONDS = 5.0


class ClusterError(SpecdecError):
    """There is no Ray or no cluster, or a machine of it cannot do its part."""


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a cluster and yield the module `ray`.

    Meanwhile its prints about workers are dropped: stdout is for results.

    Args:
        address: cluster address; AUTO: the one that runs on this machine, else a temporary one of
            this machine alone.

    Raises ClusterError if there is no Ray, or no cluster.
    """
    ray = _import_ray()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        _connect(ray, address)
        try:
            yield ray
        finally:
            ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ClusterError(f"--ray needs Ray: {install_command('ray')}") from error
    return ray


def _connect(ray: Any, address: str) -> None:
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address == AUTO and running_cluster() is None:
        address = "local"
        quiet |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    elif address != AUTO:
        _check_address(address)
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise ClusterError(
            f"Ray cannot join what listens at {address}: it takes the cluster's version of Ray, "
            "and RAY_AUTH_MODE=token where `ray start` said that it wants tokens"
        ) from error
    except (RuntimeError, ValueError) as error:  # of another version of Ray or Python, say
        raise ClusterError(f"Ray at {address}: {first_line(str(error))}") from error


def running_cluster() -> str | None:
    """Return the address of the cluster that this machine belongs to.

    A cluster that ended without `ray stop` is ignored: Ray would retry for minutes.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        noted = Path(folder, "ray", "ray_current_cluster")
        address = noted.read_text().strip() if noted.is_file() else ""
    return address if address and _answers(address) else None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError):
        return False
    return True


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and len(port) < 6):
        raise ClusterError(
            f"--ray is {address!r}, must be auto, or HOST:PORT as `ray start` told it"
        )
    if not _answers(address):
        raise ClusterError(
            f"nobody answers at {address}: start a cluster with `ray start --head`, or use --ray "
            "auto"
        )


def last_line(text: str) -> str:
    return first_line(text.strip().splitlines()[-1]) if text.strip() else first_line(text)


def first_line(text: str) -> str:
    """Return the first line of Ray's reason for something."""
    return next(iter(text.strip().splitlines()), "no reason is known")

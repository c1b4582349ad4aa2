"""Records of the running servers of this user, for `specdec ps` and `specdec stop`.

Each server keeps a file in the cache folder and a lock on it (flock), which the kernel releases
however the server ends. So a record whose lock is free is left over, also where its process number
belongs to another process by now.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from offload.process.disk_cache import cache_folder

_MAX_BYTES = 64 << 10  # of the names of many models
_HEALTH_SECONDS = 3.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ServerRecord:
    """One server.

    names: of its models, for clients. budget_bytes: of its model, and None until that is loaded; of
    several models together. started_at: seconds since 1970.
    """

    pid: int
    host: str
    names: tuple[str, ...]
    url: str
    budget_bytes: int | None
    started_at: float

    @property
    def is_here(self) -> bool:
        """Return whether it runs on this machine: home folders may be shared."""
        return self.host == socket.gethostname()

    def state(self) -> str:
        """Return what its /health says, or "no answer"."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=_HEALTH_SECONDS
        )
        try:
            connection.request("GET", "/health")
            return str(json.loads(connection.getresponse().read(_MAX_BYTES))["status"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return "no answer"
        finally:
            connection.close()

    def stop(self) -> None:
        """Ask it to end, as SIGTERM does: its requests have their time. Raises OSError."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


class OwnRecord:
    """The record of this process, from now until `remove` or the end of the process.

    Raises OSError if the cache folder cannot be written to.
    """

    def __init__(self, names: Sequence[str], url: str) -> None:
        self._record = ServerRecord(
            os.getpid(), socket.gethostname(), tuple(names), url, None, time.time()
        )
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._path = tempfile.mkstemp(".json", f"{os.getpid()}-", folder)
        # An empty file is nobody's leftover: it is locked before anything is in it.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._write()

    def set_budget(self, n_bytes: int) -> None:
        self._record = replace(self._record, budget_bytes=n_bytes)
        with suppress(OSError):  # a full disk: the rest of the record stands
            self._write()

    def _write(self) -> None:
        os.pwrite(self._file, json.dumps(asdict(self._record)).encode().ljust(_MAX_BYTES), 0)

    def remove(self) -> None:
        """Remove the file, at the server's end."""
        with suppress(OSError):
            os.unlink(self._path)


def running_servers() -> list[ServerRecord]:
    """Return the servers of this user on this machine, oldest first; remove what others left."""
    records = [_read(path) for path in _folder().glob("*.json")]
    here = [item for item in records if item is not None and item.is_here]
    return sorted(here, key=lambda item: (item.started_at, item.pid))


def wait_until_ended(servers: Sequence[ServerRecord], seconds: float) -> bool:
    """Return whether these have ended within so many seconds."""
    end, pids = time.monotonic() + seconds, {item.pid for item in servers}
    while pids & {item.pid for item in running_servers()}:
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _read(path: Path) -> ServerRecord | None:
    """Return a running server's record, or another machine's; None, and no file, once ended."""
    try:
        with open(path, "rb+") as file:
            content = json.loads(file.read(_MAX_BYTES))
            record = ServerRecord(**{**content, "names": tuple(content["names"])})
            if not record.is_here:  # a shared folder may not show the locks of other machines
                return record
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return record
            path.unlink()
    except (OSError, ValueError, KeyError, TypeError):  # it has ended just now, or only begins
        return None
    return None


def _folder() -> Path:
    return cache_folder() / "servers"

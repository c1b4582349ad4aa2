"""A local server that speaks the hub's protocol, as far as huggingface_hub asks for files.

It serves repositories from folders, sends ranges, and counts what it sends. Repositories named
gated/..., slow/... and broken/... answer as such ones do.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34
SLOW_SECONDS = 20.0


class FakeHub:
    """Repositories by name, and the bytes of files that were sent."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.ranges: list[tuple[str, int]] = []
        """(file, bytes sent) for each request of a file's content."""
        self.endpoint = ""

    def sent_bytes(self, suffix: str) -> int:
        """Return the bytes sent of files with this suffix."""
        return sum(n_bytes for name, n_bytes in self.ranges if name.endswith(suffix))

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """Return the variables that send huggingface_hub here."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            **more,
        }


@contextmanager
def serve_hub(repositories: dict[str, Path]) -> Iterator[FakeHub]:
    hub = FakeHub(repositories)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            self._metadata(match[1], match[2] or "")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[3], with_body)
        else:
            self._error(404, "EntryNotFound", "no such page")

    def _metadata(self, repo: str, rest: str) -> None:
        if repo.startswith("slow/"):
            time.sleep(SLOW_SECONDS)
        if repo.startswith("broken/"):
            return self._error(503, "", "maintenance")
        if repo.startswith("gated/"):
            return self._error(403, "GatedRepo", "you are not in the authorized list")
        if repo not in self.hub.repositories:
            return self._error(401, "RepoNotFound", "Invalid username or password.")
        revision = rest.split("/")[2] if rest.count("/") >= 2 else "main"
        if revision not in ("main", COMMIT):
            return self._error(404, "RevisionNotFound", f"no {revision}")
        root = self.hub.repositories[repo]
        names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
        if rest.startswith("/tree/"):
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": (root / name).stat().st_size,
                    "oid": _etag(name),
                }
                for name in names
            ]
            return self._json(entries)
        siblings = [
            {"rfilename": name, "size": (root / name).stat().st_size, "blobId": _etag(name)}
            for name in names
        ]
        return self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})

    def _file(self, repo: str, name: str, with_body: bool) -> None:
        path = self.hub.repositories[repo] / name
        if not path.is_file():
            return self._error(404, "EntryNotFound", f"no {name}")
        size = path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        start, end = (int(span[1]), min(int(span[2]) + 1, size)) if span else (0, size)
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{_etag(name)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            self.hub.ranges.append((name, end - start))
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read(end - start))
        return None

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()

"""A server of a tiny model for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from browsing import open_browser, open_page, wait_until_ready
from serving import Server
from tiny_pair import save_model

TEMPLATE = (
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server whose chat template supports tools."""
    folder = save_model(tmp_path_factory.mktemp("served") / "tiny", seed=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def server(served_model: Path) -> Iterator[Server]:
    # A fixed number of draft tokens: with auto, a busy machine may show that none pays.
    drafts = ("-md", str(served_model), "--num-draft-tokens", "4")
    with Server(served_model, *drafts, "-c", "512") as started:
        yield started.ready()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page of the server, ready."""
    with open_page(browser, server.url) as opened:
        wait_until_ready(opened)
        yield opened

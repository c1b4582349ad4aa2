"""The page at /: the files served, and the events that it reads."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from serving import Server

import specdec.serve

FOLDER = Path(specdec.serve.__file__).parent / "page"
SCRIPTS = [f"/page/{path.relative_to(FOLDER).as_posix()}" for path in sorted(FOLDER.rglob("*.js"))]
FILES = ["/", "/page/style.css", "/page/messages.css", *SCRIPTS]
LIBRARY = "/page/vendor/marked.js"


@pytest.mark.parametrize("path", FILES)
def test_the_page_needs_nothing_from_elsewhere(server: Server, path: str) -> None:
    status, text = server.get(path)
    assert status == 200
    assert not re.search(r"^(import|export) .*from [\"'](?!\./)", text, re.MULTILINE)
    if path != LIBRARY:  # it has its own address in a comment
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.", text)
    # Model output is text.
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser", text)


def test_the_library_comes_with_its_licence_and_is_not_made_html(server: Server) -> None:
    assert "Permission is hereby granted" in (FOLDER / "vendor" / "LICENSE-marked").read_text()
    renderer = (FOLDER / "markdown.js").read_text()
    assert re.findall(r"import (.*) from \"\./vendor", renderer) == ["{ lexer }"]
    assert server.get("/page/vendor/LICENSE-marked")[0] == 404
    assert server.get("/page/../app.py")[0] == 404


def test_a_browser_may_load_it_with_the_key_as_password(served_model: Path) -> None:
    with Server(served_model, environment={"SPECDEC_API_KEY": "s3cret"}) as server:
        server.ready()
        assert [server.get(path)[0] for path in FILES] == [401] * len(FILES)
        for word, expected in (("s3cret", 200), ("s3cre", 401), ("", 401)):
            given = base64.b64encode(f"any:{word}".encode()).decode()
            assert server.get("/", {"Authorization": f"Basic {given}"})[0] == expected
        assert server.get("/", {"Authorization": "Basic ?"})[0] == 401


def test_events_tell_what_had_been_drafted(server: Server) -> None:
    from serving import events

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_draft": True, "include_usage": True}}
    with server.post_raw("/v1/chat/completions", body) as raw:
        raw.settimeout(60)
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            text += raw.recv(65536)
    received = events(text.decode().replace("\r\n", "\n"))
    drafts = [event["draft"] for event in received if "draft" in event]
    assert sum(draft["n_tokens"] for draft in drafts) == 30
    n_accepted = received[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 <= n_accepted - sum(draft["n_accepted"] for draft in drafts) <= 1  # cut at the end
    for event in received:
        if "draft" in event:
            content = event["choices"][0]["delta"].get("content", "")
            assert event["draft"]["n_accepted_characters"] <= len(content)

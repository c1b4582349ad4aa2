"""The page of a server of several models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from browsing import answers, open_page, send, wait_until_idle, wait_until_ready
from presets import PresetServer, preset


def test_a_model_is_chosen(browser: Any, served_model: Path, tmp_path: Path) -> None:
    model = json.dumps(str(served_model))
    sections = "".join(f"[{name}]\nmodel = {model}\n" for name in ("first", "second"))
    path = preset(tmp_path, f'spec-type = "none"\nctx-size = 256\n{sections}')
    with PresetServer(path, "--max-output-tokens", "4") as server:
        server.ready()
        with open_page(browser, server.url) as page:
            wait_until_ready(page)
            choice = page.get_by_label("Model", exact=True)
            assert choice.locator("option").all_inner_texts() == ["first", "second"]
            choice.select_option("second")
            page.locator("#model", has_text="second").wait_for(state="attached")
            assert page.title() == "second – specdec"
            send(page, "Hello")
            wait_until_idle(page)
            assert len(answers(page)) == 1
        states = json.loads(server.get("/health")[1])["models"]
    assert states == {"first": "unloaded", "second": "ready"}

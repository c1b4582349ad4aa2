"""A hybrid behind the server: the second turn of a chat reuses states, which /metrics counts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from checkpoints import save_tiny_checkpoint
from serving import Server
from tiny_pair import save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <t>{% endif %}"
)
CHAT = "/v1/chat/completions"


def test_two_turns(tmp_path: Path) -> None:
    save_tiny_checkpoint("qwen3.5", tmp_path, vocab_size=259, max_position_embeddings=2048)
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "user", "content": "What is the answer to everything there is?"}]
    asked = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with Server(tmp_path, "--spec-type", "none", "-c", "512") as server:
        server.ready()
        assert server.metric("specdec_state_bytes") == 0
        _, first = server.post(CHAT, {**asked, "messages": messages})
        n_first = first["usage"]["prompt_tokens"]
        assert server.metric("specdec_state_bytes") > 0
        answer = first["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
        _, second = server.post(CHAT, {**asked, "messages": messages})
        reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert reused == n_first - len("<t>")  # the thought is not part of the second prompt

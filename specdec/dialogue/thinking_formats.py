"""Formats of reasoning. Specific ones come first."""

from __future__ import annotations

from specdec.dialogue.formats import ChannelMarks, ThinkingFormat

THINKING_FORMATS = (
    ThinkingFormat(
        "harmony",
        (),
        (),
        marks=("<|channel|>analysis",),
        channels=ChannelMarks(
            "<|start|>assistant",
            "<|message|>",
            ("<|end|>", "<|return|>", "<|call|>"),
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
        ),
    ),
    ThinkingFormat(
        "muse",
        (),
        (),
        marks=("assistant to=self<|message|>",),
        channels=ChannelMarks(
            "<|start|>assistant",
            "<|message|>",
            ("<|eom|>", "<|eot|>"),
            " to=self<|message|>",
            " to=user<|message|>",
            tags_calls=True,
        ),
    ),
    ThinkingFormat(
        "gemma4",
        ("<|channel>thought",),
        ("<channel|>",),
    ),
    ThinkingFormat(
        "kimi-k3",
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        ignored=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        marks=("<|open|>", "<|sep|>", "'think'"),
    ),
    ThinkingFormat(
        "command",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ThinkingFormat("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    ThinkingFormat(
        "solar",
        ("<|think|>",),
        ("<|end|>",),
        ignored=("<|begin|>assistant", "<|content|>"),
        marks=("<|begin|>assistant", "<|think|>"),
    ),
    ThinkingFormat("mistral", ("[THINK]",), ("[/THINK]",)),
    ThinkingFormat("seed-oss", ("<seed:think>",), ("</seed:think>",)),
    ThinkingFormat("minimax-m3", ("<mm:think>",), ("</mm:think>",)),
    ThinkingFormat(
        "hunyuan", ("<think:opensource>",), ("</think:opensource>",), marks=("<think{}>",)
    ),
    ThinkingFormat(
        "apriel",
        ("Here are my reasoning steps:\n", "<thinking>"),
        ("[BEGIN FINAL RESPONSE]", "</thinking>"),
        ignored=("[END FINAL RESPONSE]",),
        marks=("[BEGIN FINAL RESPONSE]",),
    ),
    ThinkingFormat(
        "granite",
        ("<think>",),
        ("</think>",),
        ignored=("<response>", "</response>"),
        marks=("<think>", "<response>", "<|start_of_role|>"),
    ),
    ThinkingFormat("kimi-vl", ("◁think▷",), ("◁/think▷",)),
    ThinkingFormat("think", ("<think>",), ("</think>",)),
    ThinkingFormat("thinking", ("<thinking>",), ("</thinking>",)),
    ThinkingFormat("reasoning", ("<reasoning>",), ("</reasoning>",)),
)

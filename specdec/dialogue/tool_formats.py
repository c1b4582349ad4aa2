"""Formats of tool calls. Specific ones come first."""

from __future__ import annotations

from specdec.dialogue.formats import JsonCalls, NamedCalls, ToolFormat
from specdec.dialogue.tagged_formats import FUNCTION, TAGGED_FORMATS

_PYTHON = NamedCalls(name_ends=("(",))

_NAMED_FORMATS = (
    ToolFormat(
        "harmony",
        "gpt-oss",
        marks=(("<|channel|>", "<|call|>"),),
        begins=(),
    ),
    ToolFormat(
        "gemma4",
        "Gemma 4",
        marks=(("<|tool_call>", "<tool_call|>"),),
        begins=("<|tool_call>",),
        ends=("<tool_call|>",),
        calls=(NamedCalls(before_name=("call:",), name_ends=("{",), raw_quote='<|"|>'),),
        ends_reasoning=True,
    ),
    ToolFormat(
        "kimi-k2",
        "Kimi K2",
        marks=(("<|tool_calls_section_begin|>",),),
        begins=("<|tool_calls_section_begin|>",),
        ends=("<|tool_calls_section_end|>",),
        calls=(
            NamedCalls(
                opening="<|tool_call_begin|>",
                name_ends=("<|tool_call_argument_begin|>",),
                closings=("<|tool_call_end|>",),
            ),
        ),
        ids="kimi",
        ends_reasoning=True,
    ),
    ToolFormat(
        "solar",
        "Solar Open",
        marks=(("<|tool_call:begin|>",),),
        begins=("<|tool_calls|>",),
        ends=("<|calls|>",),
        calls=(
            NamedCalls(
                opening="<|tool_call:begin|>",
                leading_id_end="<|tool_call:name|>",
                name_ends=("<|tool_call:args|>",),
                closings=("<|tool_call:end|>",),
            ),
        ),
    ),
    ToolFormat(
        "deepseek-v3",
        "DeepSeek V3, R1, V3.1",
        marks=(("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",)),
        begins=("<｜tool▁calls▁begin｜>",),
        ends=("<｜tool▁calls▁end｜>",),
        calls=(
            NamedCalls(
                opening="<｜tool▁call▁begin｜>",
                before_name=("function<｜tool▁sep｜>",),
                name_ends=("<｜tool▁sep｜>", "\n"),
                before_arguments=("```", "json"),
                closings=("```", "<｜tool▁call▁end｜>"),
            ),
        ),
        ends_reasoning=True,
        example="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "functionary-v3.1",
        "Functionary 3.1",
        marks=(("<function=", "<|python_tag|>"), ("<function=", "</function>")),
        begins=("<function=",),
        calls=(NamedCalls(opening="<function=", name_ends=(">",), closings=("</function>",)),),
    ),
    ToolFormat(
        "mistral",
        "Mistral: v3, v7, v11 (with [CALL_ID]), v13",
        marks=(("[TOOL_CALLS]",), ("[AVAILABLE_TOOLS]",)),
        begins=("[TOOL_CALLS]",),
        calls=(NamedCalls(id_end="[ARGS]", name_ends=("[CALL_ID]", "[ARGS]", "{")),),
        ids="mistral",
        ends_reasoning=True,
    ),
    ToolFormat(
        "lfm2",
        "LFM2, LFM2.5",
        marks=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        calls=(_PYTHON,),
    ),
    ToolFormat(
        "functionary-v3.2",
        "Functionary 3.2",
        marks=((">>>all", "recipient"), (">>>", "recipient")),
        begins=(">>>",),
        calls=(NamedCalls(name_ends=("\n",), text_name="all"),),
    ),
    ToolFormat(
        "llama4",
        "Llama 4 and 3.2 in Python's notation",
        marks=(("<|python_start|>",), ("[func_name1(params_name1=params_value1",)),
        begins=("<|python_start|>",),
        ends=("<|python_end|>",),
        calls=(_PYTHON,),
        is_bare=True,
    ),
)
_JSON_FORMATS = (
    ToolFormat(
        "command-r7b",
        "Command R7B, Command A",
        marks=(("<|START_ACTION|>",),),
        begins=("<|START_ACTION|>",),
        ends=("<|END_ACTION|>",),
        ends_reasoning=True,
    ),
    ToolFormat(
        "command-r",
        "Command R, R+",
        marks=(("Action:", "```json", "tool_name"),),
        begins=("Action:\n```json", "Action: ```json", "Action:```json"),
        ends=("```",),
        ignored_names=("directly-answer", "directly_answer"),
    ),
    ToolFormat(
        "granite",
        "Granite 3",
        marks=(("<|tool_call|>", "<|start_of_role|>"),),
        begins=("<|tool_call|>", "<tool_call>"),
        ends=("</tool_call>",),
    ),
    ToolFormat(
        "phi4",
        "Phi-4 mini",
        marks=(("<|tool_call|>",), ("<|tool|>", "<|/tool|>")),
        begins=("<|tool_call|>",),
        ends=("<|/tool_call|>",),
    ),
    ToolFormat(
        "apertus",
        "Apertus",
        marks=(("<|tools_prefix|>",),),
        begins=("<|tools_prefix|>",),
        ends=("<|tools_suffix|>",),
        calls=(JsonCalls(has_name_as_key=True),),
        ends_reasoning=True,
    ),
    ToolFormat(
        "nemotron-v2",
        "Nemotron Nano 2",
        marks=(("<TOOLCALL>",),),
        begins=("<TOOLCALL>",),
        ends=("</TOOLCALL>",),
    ),
    ToolFormat(
        "tool-calls",
        "MiniMax M1, Apriel",
        marks=(("<tool_calls>",),),
        begins=("<tool_calls>",),
        ends=("</tool_calls>",),
    ),
    ToolFormat(
        "gigachat",
        "GigaChat 3",
        marks=(("<|role_sep|>", "function call"),),
        begins=("<|function_call|>", "function call<|role_sep|>"),
    ),
    ToolFormat(
        "firefunction",
        "FireFunction 2",
        marks=(("functools[",), ("functools",)),
        begins=("functools",),
    ),
    ToolFormat(
        "hermes",
        "Hermes, Qwen 2.5 and 3, QwQ, Granite 4, SmolLM3, MiMo, Reka, Bielik",
        marks=(("<tool_call>",),),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        calls=(JsonCalls(), FUNCTION),
        example='<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    ),
    ToolFormat(
        "llama3",
        "Llama 3.1 to 4",
        marks=(("<|python_tag|>",), ('{"name": ', '"parameters": '), ("Environment: ipython",)),
        begins=("<|python_tag|>",),
        is_bare=True,
    ),
)
TOOL_FORMATS = (*TAGGED_FORMATS, *_NAMED_FORMATS, *_JSON_FORMATS)
HERMES = next(form for form in TOOL_FORMATS if form.name == "hermes")
"""Format that a model is told of if its template tells it of none."""

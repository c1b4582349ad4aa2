"""The table of formats. Rows that are more specific come first."""

from __future__ import annotations

from dataclasses import replace

from specdec.dialogue.formats import (
    ChannelMarks,
    JsonCalls,
    NamedCalls,
    TaggedCalls,
    ThinkingFormat,
    ToolFormat,
)

_FUNCTION = TaggedCalls(
    opening="<function=",
    name_ends=(">",),
    parameter="<parameter=",
    key_end=">",
    value_end="</parameter>",
    closing="</function>",
    strips_newline=True,
)
_INVOKE = TaggedCalls(
    opening='<invoke name="',
    name_ends=('"',),
    tag_end=">",
    parameter='<parameter name="',
    key_end='"',
    value_tag_end=">",
    value_end="</parameter>",
    closing="</invoke>",
)
_DSML = TaggedCalls(
    opening='<｜DSML｜invoke name="',
    name_ends=('"',),
    tag_end=">",
    parameter='<｜DSML｜parameter name="',
    key_end='"',
    value_tag_end=">",
    value_end="</｜DSML｜parameter>",
    closing="</｜DSML｜invoke>",
)
_ARG_KEY = TaggedCalls(
    opening="",
    name_ends=("\n",),
    parameter="<arg_key>",
    key_end="</arg_key>",
    value_tag_end="<arg_value>",
    value_end="</arg_value>",
    closing="</tool_call>",
)
_PYTHON = NamedCalls(name_ends=("(",))
_NS = "]<]minimax[>["
_JSON = JsonCalls()

TOOL_FORMATS = (
    ToolFormat(
        "harmony",
        "gpt-oss",
        marks=(("<|channel|>", "<|call|>"),),
        begins=(),
    ),
    ToolFormat(
        "muse",
        "Muse Glimmer",
        marks=(("<atem:function_calls>",),),
        begins=("<atem:function_calls>",),
        ends=("</atem:function_calls>",),
        calls=(
            replace(
                _INVOKE,
                opening='<atem:invoke name="',
                parameter='<atem:parameter name="',
                value_end="</atem:parameter>",
                closing="</atem:invoke>",
            ),
        ),
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
        "kimi-k3",
        "Kimi K3",
        marks=(("<|open|>", "<|close|>", "<|sep|>"),),
        begins=("<|open|>tools<|sep|>",),
        ends=("<|close|>tools<|sep|>",),
        calls=(
            TaggedCalls(
                opening='<|open|>call tool="',
                name_ends=('"',),
                tag_end="<|sep|>",
                parameter='<|open|>argument key="',
                key_end='"',
                value_tag_end="<|sep|>",
                value_end="<|close|>argument<|sep|>",
                closing="<|close|>call<|sep|>",
            ),
        ),
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
        "deepseek-v4",
        "DeepSeek V4",
        marks=(("｜DSML｜", "tool_calls>"),),
        begins=("<｜DSML｜tool_calls>",),
        ends=("</｜DSML｜tool_calls>",),
        calls=(_DSML,),
        ends_reasoning=True,
    ),
    ToolFormat(
        "deepseek-v3.2",
        "DeepSeek V3.2",
        marks=(("｜DSML｜",),),
        begins=("<｜DSML｜function_calls>",),
        ends=("</｜DSML｜function_calls>",),
        calls=(_DSML,),
        ends_reasoning=True,
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
                before_arguments=("```json", "```"),
                closings=("```", "<｜tool▁call▁end｜>"),
            ),
        ),
        ends_reasoning=True,
        example="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "minimax-m3",
        "MiniMax M3",
        marks=((_NS, "<invoke name="),),
        begins=(f"{_NS}<tool_call>",),
        ends=(f"{_NS}</tool_call>",),
        calls=(
            TaggedCalls(
                opening=f'{_NS}<invoke name="',
                name_ends=('"',),
                tag_end=">",
                parameter=f"{_NS}<",
                key_end=">",
                value_end=f"{_NS}</{{key}}>",
                closing=f"{_NS}</invoke>",
            ),
        ),
        ends_reasoning=True,
    ),
    ToolFormat(
        "minimax-m2",
        "MiniMax M2",
        marks=(("<minimax:tool_call>",),),
        begins=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
        calls=(_INVOKE,),
        ends_reasoning=True,
    ),
    ToolFormat(
        "seed-oss",
        "Seed-OSS",
        marks=(("<seed:tool_call>",), ("seed:tool_call",)),
        begins=("<seed:tool_call>",),
        ends=("</seed:tool_call>",),
        calls=(replace(_FUNCTION, strips_newline=False),),
    ),
    ToolFormat(
        "hunyuan",
        "Hunyuan Hy3",
        marks=(("<tool_sep{}>", "<arg_key{}>"),),
        begins=("<tool_calls:opensource>",),
        ends=("</tool_calls:opensource>",),
        calls=(
            replace(
                _ARG_KEY,
                opening="<tool_call:opensource>",
                name_ends=("<tool_sep:opensource>",),
                parameter="<arg_key:opensource>",
                key_end="</arg_key:opensource>",
                value_tag_end="<arg_value:opensource>",
                value_end="</arg_value:opensource>",
                closing="</tool_call:opensource>",
            ),
        ),
    ),
    ToolFormat(
        "glm",
        "GLM 4.5 to 4.7, Ling 3, Laguna, Spark",
        marks=(("<arg_key>", "<tool_call>"),),
        begins=("<tool_call>",),
        calls=(_ARG_KEY,),
    ),
    ToolFormat(
        "qwen3-coder",
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
        marks=(("<tool_call>", "<function="),),
        begins=("<tool_call>", "<function="),
        ends=("</tool_call>",),
        calls=(_FUNCTION,),
    ),
    ToolFormat(
        "functionary-v3.1",
        "Functionary 3.1",
        marks=(("<function=", "<|python_tag|>"), ("<function=", "</function>")),
        begins=("<function=",),
        calls=(
            NamedCalls(opening="<function=", name_ends=(">",), closings=("</function>",)),
        ),
    ),
    ToolFormat(
        "minicpm5",
        "MiniCPM 5",
        marks=(('<function name="', '<param name="'),),
        begins=('<function name="',),
        calls=(
            replace(
                _INVOKE,
                opening='<function name="',
                parameter='<param name="',
                value_end="</param>",
                closing="</function>",
            ),
        ),
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
        "lfm2",
        "LFM2, LFM2.5",
        marks=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        calls=(_PYTHON,),
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
    ToolFormat(
        "hermes",
        "Hermes, Qwen 2.5 and 3, QwQ, Granite 4, SmolLM3, MiMo, Reka, Bielik",
        marks=(("<tool_call>",),),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        calls=(_JSON, _FUNCTION),
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
HERMES = next(form for form in TOOL_FORMATS if form.name == "hermes")
"""Format that a model is told of if its template tells it of none."""

THINKING_FORMATS = (
    ThinkingFormat(
        "harmony",
        (),
        (),
        marks=("<|channel|>analysis",),
        channels=ChannelMarks(
            "<|start|>assistant", "<|message|>", ("<|end|>", "<|return|>", "<|call|>")
        ),
    ),
    ThinkingFormat(
        "muse",
        (),
        (),
        marks=("assistant to=self<|message|>",),
        channels=ChannelMarks(
            "<|start|>assistant", "<|message|>", ("<|eom|>", "<|eot|>"), tags_calls=True
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

"""Formats of tool calls whose arguments have a tag each. Specific ones come first."""

from __future__ import annotations

from dataclasses import replace

from specdec.dialogue.formats import TaggedCalls, ToolFormat

FUNCTION = TaggedCalls(
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
_NS = "]<]minimax[>["

TAGGED_FORMATS = (
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
        calls=(replace(FUNCTION, strips_newline=False),),
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
        calls=(FUNCTION,),
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
)

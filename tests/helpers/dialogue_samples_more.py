"""Outputs of models in half of the formats."""

from __future__ import annotations

from dialogue_sample import FIRST, Sample

MORE_SAMPLES = (
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello, <world>!<|return|>",
        (),
        content="Hello, <world>!",
        reasoning="Hm",
        thinking="harmony",
        begins_in="header",
    ),
    Sample(
        "harmony",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm<|end|>"
        '<|start|>assistant<|channel|>final <|constrain|>json<|message|>{"a": 1}',
        (),
        content='{"a": 1}',
        reasoning="Hm",
        thinking="harmony",
        begins_in="header",
    ),
    Sample(
        "muse",
        " to=self<|message|>Hm<|eom|><|start|>assistant to=get_weather<|message|>"
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>I look.<|eot|>",
        FIRST,
        content="I look.",
        reasoning="Hm",
        thinking="muse",
        begins_in="header",
    ),
    Sample(
        "tool-calls",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_calls>',
    ),
    Sample(
        "tool-calls",
        'I reason\n[BEGIN FINAL RESPONSE]\nDone.\n<tool_calls>[{"name": "get_weather", '
        '"arguments": {"city": "Paris", "days": 2}, "id": "a"}]</tool_calls>',
        FIRST,
        content="Done.",
        reasoning="I reason",
        thinking="apriel",
        begins_in="reasoning",
    ),
    Sample(
        "minimax-m2",
        'Two.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n'
        '</invoke>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        reasoning="Two.",
        thinking="think",
        begins_in="reasoning",
    ),
    Sample(
        "minimax-m3",
        "<mm:think>Two.</mm:think>]<]minimax[>[<tool_call>\n]<]minimax[>["
        '<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>['
        "<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>["
        '<invoke name="get_weather">]<]minimax[>[<city>Rome]<]minimax[>[</city>]<]minimax[>['
        "</invoke>\n]<]minimax[>[</tool_call>",
        reasoning="Two.",
        thinking="minimax-m3",
    ),
    Sample(
        "gemma4",
        '<|channel>thought\nTwo.\n<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Paris'
        '<|"|>,days:2}<tool_call|><|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>',
        content="I look.",
        reasoning="Two.",
        thinking="gemma4",
    ),
    Sample(
        "gemma4",
        '<|tool_call>call:get_weather{code:<|"|>say "hi"\\n{}<|"|>,tags:[<|"|>a<|"|>,true,{b:1}]}'
        "<tool_call|>",
        (("get_weather", {"code": 'say "hi"\\n{}', "tags": ["a", True, {"b": 1}]}),),
    ),
    Sample(
        "granite",
        '<think>Two.</think><response>I look.</response><|tool_call|>[{"name": "get_weather", '
        '"arguments": {"city": "Paris", "days": 2}}, {"name": "get_weather", "arguments": '
        '{"city": "Rome"}}]',
        content="I look.",
        reasoning="Two.",
        thinking="granite",
    ),
    Sample(
        "nemotron-v2",
        'ok\n</think>\n\n<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": '
        '2}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]</TOOLCALL>',
        reasoning="ok",
        thinking="think",
        begins_in="reasoning",
    ),
    Sample(
        "phi4",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome"}}]<|/tool_call|>',
    ),
    Sample(
        "lfm2",
        "I look.<|tool_call_start|>[get_weather(city='Paris', days=2), get_weather(city='Rome')]"
        "<|tool_call_end|>",
        content="I look.",
    ),
    Sample(
        "lfm2",
        "<|tool_call_start|>[get_weather(city=\"it's\", days=None, tags=('a', 'b\\'c'), "
        "code={'x': [1.5, True]})]<|tool_call_end|>Done.",
        (
            (
                "get_weather",
                {"city": "it's", "days": None, "tags": ["a", "b'c"], "code": {"x": [1.5, True]}},
            ),
        ),
        content="Done.",
    ),
    Sample(
        "command-r7b",
        "<|START_THINKING|>I'm\nthinking<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", '
        '"days": 2}},\n    {"tool_call_id": "1", "tool_name": "get_weather", "parameters": '
        '{"city": "Rome"}}\n]<|END_ACTION|>',
        reasoning="I'm\nthinking",
        thinking="command",
    ),
    Sample(
        "command-r7b",
        "Hm<|END_THINKING|><|START_RESPONSE|>Hello\n world<|END_RESPONSE|>",
        (),
        content="Hello\n world",
        reasoning="Hm",
        thinking="command",
        begins_in="reasoning",
    ),
    Sample(
        "command-r",
        'Action:\n```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
        '{"city": "Paris", "days": 2}\n    },\n    {"tool_name": "get_weather", "parameters": '
        '{"city": "Rome"}}\n]\n```',
    ),
    Sample(
        "apertus",
        '<|inner_prefix|>Two.<|inner_suffix|><|tools_prefix|>[{"get_weather": {"city": '
        '"Paris", "days": 2}}, {"get_weather": {"city": "Rome"}}]<|tools_suffix|>',
        reasoning="Two.",
        thinking="apertus",
    ),
    Sample(
        "gigachat",
        '<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}',
        FIRST,
    ),
    Sample(
        "gigachat",
        'I look.\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": '
        '"Paris", "days": 2}}',
        FIRST,
        content="I look.",
    ),
    Sample(
        "firefunction",
        ' functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    ),
    Sample(
        "functionary-v3.1",
        '<function=get_weather>{"city": "Paris", "days": 2}</function>'
        '<function=get_weather>{"city": "Rome"}</function>',
    ),
    Sample(
        "functionary-v3.2",
        'get_weather\n{"city": "Paris", "days": 2}>>>get_weather\n{"city": "Rome"}',
        begins_in="call",
    ),
    Sample(
        "functionary-v3.2",
        "all\nHello!\nYou?",
        (),
        content="Hello!\nYou?",
        begins_in="call",
    ),
    Sample(
        "minicpm5",
        '<function name="get_weather"><param name="city">Paris</param><param name="days">2</param>'
        '</function>\n<function name="get_weather"><param name="city">Rome</param></function>',
    ),
    Sample(
        "solar",
        "<|think|>Two.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>abcdef123"
        '<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris", "days": 2}'
        "<|tool_call:end|><|tool_call:begin|>abcdef124<|tool_call:name|>get_weather"
        '<|tool_call:args|>{"city": "Rome"}<|tool_call:end|><|calls|>',
        reasoning="Two.",
        thinking="solar",
    ),
)

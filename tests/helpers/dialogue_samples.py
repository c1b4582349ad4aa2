"""Outputs of models in each format."""

from __future__ import annotations

from dialogue_sample import FIRST, Sample
from dialogue_samples_more import MORE_SAMPLES

SAMPLES = (
    Sample(
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", '
        '"days": 2}}\n</tool_call>\n<tool_call>\n{"arguments": {"city": "Rome"}, "name": '
        '"get_weather"}\n</tool_call>',
        content="Let me look.",
    ),
    Sample(
        "hermes",
        "<think>\nParis\nand Rome.\n</think>\n\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
        '</tool_call>\n<tool_call>{"name": "get_weather", "arguments": '
        '"{\\"city\\": \\"Rome\\"}"}</tool_call>',
        reasoning="Paris\nand Rome.",
        thinking="think",
    ),
    Sample("hermes", "Two <b>words</b>.\n", (), content="Two <b>words</b>.\n"),
    Sample(
        "hermes",
        "because\n</think>\n\nYes, <tool is no call.",
        (),
        content="Yes, <tool is no call.",
        reasoning="because",
        thinking="think",
        begins_in="reasoning",
    ),
    Sample(
        "qwen3-coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        content="I look.",
    ),
    Sample(
        "qwen3-coder",
        '<function=get_weather>\n<parameter=code>\nif a < b:\n    print("</b>\\n")\n\n'
        '</parameter>\n<parameter=tags>\n["a", "ü"]\n</parameter>\n</function>',
        (("get_weather", {"code": 'if a < b:\n    print("</b>\\n")\n', "tags": ["a", "ü"]}),),
    ),
    Sample(
        "seed-oss",
        "<seed:think>Two cities.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
        reasoning="Two cities.",
        thinking="seed-oss",
    ),
    Sample(
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Rome"}}',
    ),
    Sample(
        "llama3",
        '<|python_tag|>{"type": "function", "function": {"name": "get_weather", "parameters": '
        '{"city": "Paris", "days": 2}}}',
        FIRST,
    ),
    Sample("llama3", '{"city": "Paris"}', (), content='{"city": "Paris"}'),
    Sample("llama4", "[get_weather(city='Paris', days=2), get_weather(city=\"Rome\")]"),
    Sample(
        "llama4",
        '<|python_start|>[get_weather(city="Paris", days=2)]<|python_end|>',
        FIRST,
    ),
    Sample("llama4", "[1, 2] is a list", (), content="[1, 2] is a list"),
    Sample(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}, "id": '
        '"123456789"}, {"name": "get_weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]',
    ),
    Sample(
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris", "days": 2}'
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}',
    ),
    Sample(
        "mistral",
        '[THINK]Both.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
        '[TOOL_CALLS]get_weather{"city": "Rome"}',
        content="I look.",
        reasoning="Both.",
        thinking="mistral",
    ),
    Sample(
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        '<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
    ),
    Sample(
        "deepseek-v3",
        "Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather'
        '<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        content="I look.",
        reasoning="Hm.",
        thinking="think",
        begins_in="reasoning",
    ),
    Sample(
        "deepseek-v3.2",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    Sample(
        "deepseek-v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">42</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        (("get_weather", {"city": "42"}),),
    ),
    Sample(
        "glm",
        "\n<think>Two.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n</tool_call>",
        reasoning="Two.",
        thinking="think",
    ),
    Sample(
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days"
        "</arg_key><arg_value>2</arg_value></tool_call><tool_call>get_weather</tool_call>",
        (*FIRST, ("get_weather", {})),
    ),
    Sample(
        "hunyuan",
        "<think:opensource>Two.</think:opensource><tool_calls:opensource>\n"
        "<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city"
        "</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>2"
        "</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        FIRST,
        reasoning="Two.",
        thinking="hunyuan",
    ),
    Sample(
        "kimi-k2",
        "<think>I ask<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        reasoning="I ask",
        thinking="think",
    ),
    Sample(
        "kimi-k3",
        "Two.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="get_weather" index="2"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        content="I look.",
        reasoning="Two.",
        thinking="kimi-k3",
        begins_in="reasoning",
    ),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>'
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Rome"}<|call|>',
        content="I look.",
        reasoning="I'm\nthinking",
        thinking="harmony",
        begins_in="header",
    ),
    *MORE_SAMPLES,
)

# ruff: noqa: RUF001  # the bars of DeepSeek's tokens
"""What models of several families write when they call a tool. Their templates lie in llama.cpp's source."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "vendor/build/stock/llama.cpp/models/templates"
ARGUMENTS = {"city": 'São "Paulo"', "days": 3}
ARGUMENTS_TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
THOUGHT = "They want the weather."
CALL_TEXT = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS_TEXT}}}\n</tool_call>'


def function(name: str, properties: dict[str, object], required: list[str]) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Calls {name}", "parameters": parameters},
    }


TOOLS = [
    function("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"]),
    function("get_time", {}, []),
]


@dataclass(frozen=True)
class Family:
    """What a model of one family writes when it calls get_weather."""

    answer: str  # what is a token of its own in these models is a plain text here
    content: str = ""
    reasoning: str = ""
    has_trigger: bool = True  # a lazy grammar can wait for the call


FAMILIES = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Family(CALL_TEXT),
    "Qwen-Qwen3-0.6B": Family(
        f"<think>\n{THOUGHT}\n</think>\n\nI look.{CALL_TEXT}", content="I look.", reasoning=THOUGHT
    ),
    "Qwen-QwQ-32B": Family(f"{THOUGHT}\n</think>\n\n{CALL_TEXT}", reasoning=THOUGHT),
    "Qwen3-Coder": Family(
        "I look.<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        f"{ARGUMENTS['city']}\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        content="I look.",
    ),
    "meta-llama-Llama-3.1-8B-Instruct": Family(
        f'{{"name": "get_weather", "parameters": {ARGUMENTS_TEXT}}}', has_trigger=False
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": Family(
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS_TEXT}, "id": "call00001"}}]'
    ),
    "deepseek-ai-DeepSeek-V3.2": Family(
        f'{THOUGHT}</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{ARGUMENTS["city"]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        reasoning=THOUGHT,
    ),
    "google-gemma-4-31B-it": Family(
        f"<|channel>thought\n{THOUGHT}\n<channel|>"
        f'<|tool_call>call:get_weather{{city:<|"|>{ARGUMENTS["city"]}<|"|>,days:3}}<tool_call|>',
        reasoning=THOUGHT,
    ),
    "openai-gpt-oss-120b": Family(
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS_TEXT}",
        reasoning=THOUGHT,
    ),
}

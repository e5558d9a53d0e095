"""Tool calls and thoughts through openai's and LangChain's clients. The server is the simulator with a real model's
tokenizer, whose answers are held to texts that models write, or to the tools' schemas.

Usage: tools.py BASE_URL
"""

import json
import sys

import openai
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

v1 = f"{sys.argv[1]}/v1"
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Tells the weather", "parameters": SCHEMA}}
CALL = '<think>\nRome, then.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'

client = openai.OpenAI(base_url=v1, api_key="none", max_retries=0)
model = client.models.list().data[0].id
says = {"structured_outputs": {"choice": [CALL]}}


def check(message, finish_reason):
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Rome"}, call
    # A stream begins with an empty text, as OpenAI's own do, before anyone knows that a call will follow.
    assert finish_reason == "tool_calls" and not message.content, message


answer = client.chat.completions.create(model=model, messages=QUESTION, tools=[TOOL], extra_body=says).choices[0]
check(answer.message, answer.finish_reason)
assert answer.message.reasoning_content == "Rome, then."

# The result goes back, and the conversation goes on.
history = [*QUESTION, answer.message, {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "sunny"}]
client.chat.completions.create(model=model, messages=history, tools=[TOOL], max_tokens=5)

with client.chat.completions.stream(model=model, messages=QUESTION, tools=[TOOL], extra_body=says) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_completion().choices[0]
assert "tool_calls.function.arguments.delta" in kinds, kinds
check(final.message, final.finish_reason)
print("openai, calls left to the model")

for choice in ["required", {"type": "function", "function": {"name": "get_weather"}}]:
    answer = client.chat.completions.create(model=model, messages=QUESTION, tools=[TOOL], tool_choice=choice).choices[0]
    for call in answer.message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ["Paris", "Rome"]


class Weather(BaseModel):
    """Tells the weather."""

    raining: bool
    wind: int


parsed = client.chat.completions.parse(model=model, messages=QUESTION, response_format=Weather, max_tokens=60).choices[0].message.parsed
assert isinstance(parsed, Weather)
tool = openai.pydantic_function_tool(Weather)
parsed = client.chat.completions.parse(model=model, messages=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False)
assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
print("openai, calls that must be made, and parse")

chat = ChatOpenAI(model=model, base_url=v1, api_key="none", max_retries=0)
bound = chat.bind_tools([TOOL], tool_choice="required")
said = bound.invoke("What is the weather?")
assert said.tool_calls and said.tool_calls[0]["name"] == "get_weather", said
whole = None
for piece in bound.stream("What is the weather?"):
    whole = piece if whole is None else whole + piece
assert whole.tool_calls[0]["args"]["city"] in ["Paris", "Rome"], whole
chat.bind_tools([TOOL], tool_choice="none").invoke(
    ["What is the weather?", said, *(ToolMessage("sunny", tool_call_id=call["id"]) for call in said.tool_calls)], max_tokens=5)
print("langchain-openai")

"""Asks a server on the simulator through the clients that people use.

Usage: clients.py BASE_URL
"""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices

import huggingface_hub
import litellm
import openai
from langchain_openai import ChatOpenAI

base = sys.argv[1]
v1 = f"{base}/v1"
QUESTION = [{"role": "user", "content": "the engine"}]


def words(text):
    return len(text.split())


def openai_sync():
    client = openai.OpenAI(base_url=v1, api_key="none", max_retries=0)
    (model,) = [entry.id for entry in client.models.list()]
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=5)
    assert words(answer.choices[0].message.content) == answer.usage.completion_tokens == 5
    text = client.completions.create(model=model, prompt="the engine", max_tokens=5)
    assert words(text.choices[0].text) == 5
    try:
        client.chat.completions.create(model=model, messages=QUESTION, extra_body={"no_such_field": 1})
    except openai.BadRequestError as error:
        assert error.param == "no_such_field"
    else:
        raise AssertionError("an unknown field was taken")
    return model


async def openai_async(model):
    client = openai.AsyncOpenAI(base_url=v1, api_key="none", max_retries=0)

    async def stream():
        text = ""
        async for event in await client.chat.completions.create(model=model, messages=QUESTION, max_tokens=5, stream=True):
            text += event.choices[0].delta.content or ""
        return words(text)

    assert await asyncio.gather(*(stream() for _ in range(8))) == [5] * 8


def langchain(model):
    chat = ChatOpenAI(model=model, base_url=v1, api_key="none", max_tokens=5, max_retries=0)
    assert words(chat.invoke("the engine").content) == 5
    assert words("".join(event.content for event in chat.stream("the engine"))) == 5


def lite(model):
    ask = {"model": f"openai/{model}", "api_base": v1, "api_key": "none", "messages": QUESTION, "max_tokens": 5}
    assert words(litellm.completion(**ask).choices[0].message.content) == 5
    events = litellm.completion(**ask, stream=True)
    assert words("".join(event.choices[0].delta.content or "" for event in events)) == 5


def text_generation_inference():
    client = huggingface_hub.InferenceClient(model=base)
    assert words(client.text_generation("the engine", max_new_tokens=5)) == 5
    assert words("".join(client.text_generation("the engine", max_new_tokens=5, stream=True))) == 5


def main():
    model = openai_sync()
    print("openai, sync")
    asyncio.run(openai_async(model))
    print("openai, async and streaming")
    langchain(model)
    print("langchain-openai")
    lite(model)
    print("litellm")
    text_generation_inference()
    print("huggingface_hub, Text Generation Inference")


main()

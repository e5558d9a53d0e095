"""Asks a service through the openai client in every way that a program would; prints the answers as JSON.

Usage: chat.py BASE_URL MODEL
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

base_url, model = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120)


def messages(question):
    return [{"role": "user", "content": question}]


def whole(question):
    answer = client.chat.completions.create(model=model, messages=messages(question), max_tokens=48, temperature=0)
    return {"text": answer.choices[0].message.content, "completion_tokens": answer.usage.completion_tokens}


def streamed(question):
    text, tokens = "", None
    stream = client.chat.completions.create(
        model=model, messages=messages(question), max_tokens=48, temperature=0,
        stream=True, stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices:
            text += event.choices[0].delta.content or ""
        if event.usage:
            tokens = event.usage.completion_tokens
    return {"text": text, "completion_tokens": tokens}


def together(*questions):
    with ThreadPoolExecutor(len(questions)) as pool:
        return [answer["text"] for answer in pool.map(streamed, questions)]


def unknown_model():
    try:
        client.chat.completions.create(model="no-such-model", messages=messages("Hi"), max_tokens=1)
    except openai.APIStatusError as error:
        return type(error).__name__
    return "no error"


FRANCE = "Complete this sentence: The capital of France is"
print(json.dumps({
    "models": [entry.id for entry in client.models.list()],
    "whole": whole(FRANCE),
    "streamed": streamed(FRANCE),
    "together": together(FRANCE, "Name three colours."),
    "unknown_model": unknown_model(),
}))

"""Embeddings through openai's and LangChain's clients, by all-MiniLM-L6-v2.

Usage: embeddings.py BASE_URL
"""

import sys

import openai
from langchain_openai import OpenAIEmbeddings

v1 = f"{sys.argv[1]}/v1"
client = openai.OpenAI(base_url=v1, api_key="none", max_retries=0)
model = client.models.list().data[0].id
TEXTS = ["A man is eating food.", "Someone eats a piece of bread.", "The stock market fell."]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b))


# The client asks for base64 unless told otherwise.
vectors = [entry.embedding for entry in client.embeddings.create(model=model, input=TEXTS).data]
floats = [entry.embedding for entry in client.embeddings.create(model=model, input=TEXTS, encoding_format="float").data]
assert all(cosine(a, b) > 0.9999 and len(a) == 384 for a, b in zip(vectors, floats))
assert cosine(vectors[0], vectors[1]) > 0.5 > cosine(vectors[0], vectors[2])
print("openai, base64 and floats")

chain = OpenAIEmbeddings(model=model, base_url=v1, api_key="none", check_embedding_ctx_length=False)
assert cosine(chain.embed_query(TEXTS[0]), vectors[0]) > 0.9999
assert cosine(chain.embed_documents(TEXTS)[1], vectors[1]) > 0.9999
print("langchain-openai")

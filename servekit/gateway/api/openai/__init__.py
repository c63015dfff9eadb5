"""OpenAI's API: chat, completions, responses, embeddings, tokenize.

Only `gateway` may import from here.
"""

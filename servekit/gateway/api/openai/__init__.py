"""OpenAI's API: chat, completions, responses, embeddings, tokenize.

Only the gateway may import from here.
"""

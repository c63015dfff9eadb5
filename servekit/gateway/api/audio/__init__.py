"""OpenAI's transcriptions and translations of recordings.

Only `gateway` may import from here.
"""

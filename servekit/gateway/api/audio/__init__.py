"""OpenAI's transcriptions and translations of recordings.

Only the gateway may import from here.
"""

"""Answers from a worker's tokens: choices, stream writing, OpenAI's byte templates.

Only the gateway may import from here.
"""

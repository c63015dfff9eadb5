"""From a worker's tokens to an answer: choices, stream writing, OpenAI's byte templates.

Only the gateway may import from here.
"""

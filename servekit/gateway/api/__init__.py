"""The HTTP APIs, a folder for each: OpenAI, Anthropic, Ollama, administration, OpenAPI document.

`endpoint` and `responder` are shared by them all. Only the gateway may import from here.
"""

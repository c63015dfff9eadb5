"""The HTTP APIs, one folder each: OpenAI, Anthropic, Ollama, administration, OpenAPI document.

All of them share `endpoint` and `fields`. Only `gateway` may import from here.
"""

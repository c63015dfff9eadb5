"""MCP servers whose tools the chat page offers, each run by a host process of its own.

Source: the Model Context Protocol, https://modelcontextprotocol.io/specification. Only `gateway`
may import from here.
"""

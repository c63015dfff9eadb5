"""The gateway process: serves HTTP and Gradio, and talks to workers by sockets. Imports no torch.

`http` speaks HTTP, `auth` checks keys, `api` holds one folder for each API, `routing` queues and
sends requests to workers, `generation` turns tokens into answers, `tool_parsing` reads tool calls,
`telemetry` counts and traces requests, `storage` keeps responses, files and batches, `tool_servers`
runs MCP servers, `ui` is the web pages.

No other part may import from here.
"""

"""The gateway process: HTTP and Gradio in front, the workers' sockets behind. Never torch.

`http` speaks HTTP, `auth` checks keys, `api` holds one folder for each API, `routing` queues and
sends requests to workers, `generation` turns tokens into answers, `tool_parsing` reads tool calls,
`ui` is the web pages. Nothing outside may import from here, `docs` excepted.
"""

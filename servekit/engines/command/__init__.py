"""The engine for a server that a command starts, and that speaks OpenAI's API.

server_process   the server, a child of the worker
local_transport  HTTP to it
handshake        first requests to the server: its model, and whether it continues an answer
engine           load, stalls, death, sleep; requests are those of the engine `remote`

Only the registry of `engines` and `engines.vllm` may import from here.
"""

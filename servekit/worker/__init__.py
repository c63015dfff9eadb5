"""The worker process: exactly one engine, behind a socket of its own.

`worker` is the process, `runner` the requests in flight; requests are checked and prepared before
the engine, and text is made of tokens after it. Nothing outside may import from here.
"""

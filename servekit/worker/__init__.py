"""The worker process: one engine behind its own socket.

`worker` holds the process life cycle and `runner` the requests in flight. Requests are validated
and prepared before they reach the engine (`preparation`), and tokens are decoded to text after it.

No other part may import from here.
"""

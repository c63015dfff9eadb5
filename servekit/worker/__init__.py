"""The worker process: exactly one engine, behind a socket of its own."""

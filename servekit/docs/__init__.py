"""The reference that a user reads, made from the code: the file, the commands, HTTP, metrics."""

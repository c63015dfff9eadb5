"""What crosses a process boundary, all of it: messages and the framed connection."""

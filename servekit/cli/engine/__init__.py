"""`servekit engine`: Python environments for engines, made, listed and removed."""

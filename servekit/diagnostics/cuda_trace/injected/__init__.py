"""The folder that `servekit trace-cuda` puts first on the PYTHONPATH of what it traces."""

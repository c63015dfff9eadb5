"""The folder that `servekit trace-cuda` puts first on the PYTHONPATH of what it traces.

Nothing imports from here: the traced program's interpreter finds it.
"""

"""The folder that `servekit trace-cuda` puts first on the PYTHONPATH of what it traces.

No part may import from here: the traced program's interpreter finds it.
"""

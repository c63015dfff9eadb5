"""Child processes: spawning, output capture, environment, the run directory, orphan clean-up.

Only `supervisor`, `ray`, and the tools that look for instances, `cli`, `chaos` and `diagnostics`,
may import from here.
"""

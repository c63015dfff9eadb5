"""Child processes: spawning, output capture, environment, the run directory, orphan clean-up.

Only the supervisor's other folders, and tools that look for instances, may import from here.
"""

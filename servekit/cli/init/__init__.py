"""`servekit init`: questions, the configuration file's template, and HuixiangDou's settings.

Only `cli` may import from here.
"""

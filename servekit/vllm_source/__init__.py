"""vLLM's source files, read without importing vLLM: by `check`, and by a worker before it loads.

reader      members of classes and functions of any package
contract    the parts of vLLM that servekit uses, the tested releases, and what follows
arguments   the names of vLLM's engine arguments, and those that servekit sets itself

Only `cli`, `config` and `engines` may import from here.
"""

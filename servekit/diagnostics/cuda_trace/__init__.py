"""`servekit trace-cuda`: find the import that initialised CUDA.

`import_chain` of `system.python`, `recorder` and `injected/` run inside traced programs, in any
Python from 3.8 on, with the standard library only; `program` starts and watches the traced program,
`report` presents the result. Only `cli` may import from here.
"""

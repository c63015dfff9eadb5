"""`servekit doctor`: checks of this machine, a sentence for each; and `cuda_trace`.

`runner` runs all checks in order; `host`, `packages`, `gpus` and `service` contain them, `finding`
is their result. Only `cli` may import from here.
"""

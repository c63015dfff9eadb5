"""`servekit chaos`: break a running instance on purpose and check its promises.

It speaks HTTP like any client, asks the control socket like `servekit ps`, and sends signals.
`client_experiments`, `process_experiments` and `machine_experiments` are what it breaks. Only `cli`
and tests may import from here.
"""

"""`servekit chaos`: break a running instance on purpose and check its promises.

It sends HTTP requests like any client, reads the control socket like `servekit ps`, and sends
signals. The faults are in `client_experiments`, `process_experiments` and `machine_experiments`.
Only `cli` may import from here.
"""

"""What gateways of a machine keep and share: stored responses, files and batches, in SQLite.

`store_file` is a connection to such a file; `leases` decide which gateway runs stored work, and
`background_runner` and `batch_runner` run it.

Only `gateway` may import from here.
"""

"""The supervisor process: it starts gateways and workers, keeps them running and ends them all.

`supervisor` is the process itself; the folders are its parts: child processes (`process`), their
life (`lifecycle`), replicas (`workers`, `deployments`), GPU memory (`scheduling`), swapping and
autoscaling, adapters, and `admin` for the control socket and metrics. It handles no request and
never imports torch, a web framework or anything that could open CUDA. Only `cli`, `chaos`,
`diagnostics` and `ray` may import from here.
"""

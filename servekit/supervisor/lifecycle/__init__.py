"""The life cycle of a supervised process: states, restarts, back-off, circuit breaker, liveness.

`managed_process` has the table of states, and the task that gateways and workers share;
`remote_process` is for processes on other machines.

Only `supervisor` and `ray` may import from here.
"""

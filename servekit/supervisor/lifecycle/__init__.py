"""The life cycle of a supervised process: states, restarts, back-off, circuit breaker, liveness.

`managed_process` is the state machine that gateways and workers share; `launcher` starts processes
on this machine or, with `ray`, on another. Only the supervisor and `ray` may import from here.
"""

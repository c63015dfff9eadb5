"""The slow lane: load on a service whose workers are killed all the time."""

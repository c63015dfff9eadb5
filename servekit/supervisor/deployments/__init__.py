"""Deployments: all replicas of a model, their rolling update, and the plan for the machine.

Only `supervisor`, `ray`, `cli` and `diagnostics` may import from here.
"""

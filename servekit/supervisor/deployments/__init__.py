"""Deployments: all replicas of a model, their rolling update, and the plan for the machine.

Only the supervisor and `cli` may import from here.
"""

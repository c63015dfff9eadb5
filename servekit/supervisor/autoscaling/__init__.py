"""Autoscaling: how many replicas a model should have, and where another one fits.

Only `supervisor` may import from here.
"""

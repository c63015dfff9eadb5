"""LoRA adapters in the supervisor: wanted state, rollout to all replicas, answers.

Only `supervisor` may import from here.
"""

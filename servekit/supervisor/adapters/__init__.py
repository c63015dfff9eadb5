"""LoRA adapters as the supervisor sees them: wanted state, rollout to all replicas, answers.

Only the supervisor may import from here.
"""

"""Speech: Whisper models, the recordings that they transcribe, and the requests for it.

Code outside the transformers engine must not import from here.
"""

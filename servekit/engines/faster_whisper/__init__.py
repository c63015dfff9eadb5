"""The faster-whisper engine: Whisper models of CTranslate2. Only the registry may import it.

Imports neither torch nor transformers.
"""

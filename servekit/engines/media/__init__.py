"""Images and recordings of prompts, and of files to transcribe: decoded, bounded, put in place.

Only `engines` may import from here. Modules import Pillow and NumPy, which texts do not need.
"""

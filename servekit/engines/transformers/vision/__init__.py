"""Vision: models that read images beside text, their processors, and the requests with images.

Code outside the transformers engine must not import from here.
"""

"""Text around tokens: tokenizer, chat template, structured output, sampling parameters.

Only engines and the worker may import from here.
"""

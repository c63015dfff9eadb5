"""Text around tokens: tokenizer, chat template, prompts with images, structured output, sampling.

Only engines and the worker may import from here.
"""

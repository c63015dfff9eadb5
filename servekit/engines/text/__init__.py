"""Text around tokens: tokenizer, chat template, prompts with images, structured output, sampling.

Only `engines` and `worker` may import from here.
"""

"""HTML and data for the pages, without Gradio. Each module escapes the HTML that it makes.

Only `gateway` may import from here.
"""

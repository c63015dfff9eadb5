"""HTML and data for the pages, without Gradio. HTML is escaped where it is made.

Only the gateway may import from here.
"""

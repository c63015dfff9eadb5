"""The pages beside the chat: each module lays out one page in Gradio and binds its events.

`page_layout` is common to all pages; `language` and the tables `texts_*` hold their texts.

Only `gateway` may import from here.
"""

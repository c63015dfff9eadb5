"""The web pages: the Gradio app, chat, status, sign-in, styles and scripts.

`pages` lays out the pages beside the chat, and `widgets` makes their HTML. Only `gateway` may
import from here.
"""

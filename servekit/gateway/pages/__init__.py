"""The pages of the UI beside the chat: what each shows, and what is asked for on it.

Each page is two modules at most: one that lays it out and binds its events, which imports Gradio,
and one that makes its HTML, which does not. All HTML is escaped where it is made: what a model or
a log says is data. `frame` is what all pages share, `language` and the two tables are their texts.
"""

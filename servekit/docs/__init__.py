"""The documentation: Markdown pages in `pages/`, printed, as a site, and at /docs.

`pages` lists and reads them, `site` makes HTML of them, `command` is `servekit docs`. `reference`
and the modules that it imports write the generated parts of pages from the source; only tests call
these.
"""

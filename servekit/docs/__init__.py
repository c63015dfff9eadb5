"""The documentation: Markdown pages in `pages/`, printed, as a site, and at /docs.

`pages` lists and reads them, `site` renders them as HTML, `command` is `servekit docs`. `reference`
and the modules that it imports generate parts of the pages from the source; only tests call these.
"""

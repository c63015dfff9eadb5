"""The documentation: Markdown pages in `pages/`, printed, as a site, and at /docs.

`pages` lists and reads them, `site` renders them as HTML. Parts of the pages are generated from the
source by `tests/reference`.

Only `cli` may import from here. A gateway runs `servekit.docs.site` as a process.
"""

"""The pages as HTML: no dead link, no markup from the texts, and a search index of all of them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from servekit.docs import pages, site
from servekit.errors import ConfigError, StartError

NAMES = list(pages.list_pages())


class Parsed(HTMLParser):
    """The ids, links and sources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if "href" in found and tag == "a" else []
        self.sources += [found["src"] or ""] if "src" in found else []


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parsed]:
    folder = tmp_path_factory.mktemp("site") / "new"
    paths = site.write_site(folder, as_html=True)
    return {path.name: Parsed(path.read_text()) for path in paths}


def test_every_link_of_the_site_leads_to_an_anchor(written: dict[str, Parsed]) -> None:
    assert set(written) == {f"{name}.html" for name in NAMES}
    for name, page in written.items():
        assert len(page.ids) == len(set(page.ids)), name
        for link in page.links:
            if link.startswith(("http://", "https://")):
                continue
            file, _, anchor = link.partition("#")
            assert not anchor or anchor in written[file or name].ids, (name, link)


def test_every_file_that_a_page_needs_is_written(tmp_path: Path) -> None:
    site.write_site(tmp_path, as_html=True)
    for path in tmp_path.glob("*.html"):
        assert all((tmp_path / source).is_file() for source in Parsed(path.read_text()).sources)
    assert (tmp_path / "search.js").is_file()


def test_at_a_running_instance_links_are_addresses() -> None:
    page = Parsed(site.make_html("gpus", is_live=True))
    local = [one for one in page.links if not one.startswith("#")]
    assert all(one.startswith(("/docs", "/ui/", "https://")) for one in local)
    assert {"/docs", "/docs/swagger", "/docs/configuration", "/ui/"} <= set(local)
    assert page.sources == ["/docs/site.js"]


def test_the_sidebar_marks_the_open_page() -> None:
    html = site.make_html("gpus", is_live=False)
    assert html.count('aria-current="page"') == 1
    assert '<a href="gpus.html" aria-current="page">GPUs and memory</a>' in html
    assert '<a href="#while-it-runs">While it runs</a>' in html


def test_texts_are_no_markup() -> None:
    assert "<script>" not in "".join(site.make_html(name, is_live=True) for name in NAMES)


def test_the_search_finds_each_section() -> None:
    script = site.make_search_index()
    sections = json.loads(script.removeprefix("window.servekitSearch = ").rstrip(";\n"))
    found = {(page, anchor) for page, _, anchor, _, _ in sections}
    assert ("worker-deaths", "requests-that-kill-workers") in found
    assert {page for page, _ in found} == set(NAMES) - {pages.INDEX}
    [text] = [one[4] for one in sections if one[:3:2] == ["gpus", "one-replica-over-several-gpus"]]
    assert "gpus_per_replica: 2" in text


def test_a_page_there_is_not() -> None:
    with pytest.raises(ConfigError, match="there is no page 'nowhere'"):
        site.make_html("nowhere", is_live=True)


def test_markdown_keeps_its_folders(tmp_path: Path) -> None:
    written = site.write_site(tmp_path / "new" / "docs", as_html=False)
    assert tmp_path / "new" / "docs" / "guides" / "gpus.md" in written
    assert (tmp_path / "new" / "docs" / "images" / "chat.png").is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot write"):
        site.write_site(tmp_path / "file" / "x", as_html=False)

"""The documentation site: built in strict mode, without the network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.config import load_config
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files

from scripts.docs_site import FORMULA, copy_of, in_mathml
from tests.layout.source import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class Loaded(HTMLParser):
    """URLs that a browser fetches for a page, and the targets of its links."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.fetched.append(str(values["href"]))
        elif values.get("src"):
            self.fetched.append(str(values["src"]))


def loaded(page: Path) -> Loaded:
    found = Loaded()
    found.feed(page.read_text())
    return found


def test_site_has_every_page(site: Path) -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix("").as_posix().removesuffix("/index") for path in docs.rglob("*.md")}
    built = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")} | {"index"}
    assert pages | {"CONTRIBUTING", "CHANGELOG", "SECURITY"} <= built


def test_nothing_is_fetched_from_other_hosts(site: Path) -> None:
    fetched = {url for page in site.rglob("*.html") for url in loaded(page).fetched}
    assert fetched and {url for url in fetched if re.match(r"(https?:)?//", url)} == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", styles) == []


def test_links_out_of_docs_lead_to_copies(site: Path) -> None:
    page = site / "recipes/index.html"
    copies = [page.parent.joinpath(link).resolve() for link in loaded(page).links if "files/" in link]
    assert len({*copies}) >= 14
    for copy in copies:
        source = ROOT / copy.relative_to(site.resolve() / "files").as_posix().removesuffix(".txt")
        assert copy.read_bytes() == source.read_bytes()
    assert "../CONTRIBUTING/" in loaded(site / "algorithms/index.html").links


def test_a_link_to_no_file_of_the_repository_is_an_error(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    for target in (tmp_path / "stranger", ROOT / "scripts/not_there.sh", ROOT / "scripts"):
        with pytest.raises(PluginError, match=r"docs/index\.md links to .*, which is no file of the repository"):
            copy_of(target, ROOT / "docs/index.md", config, Files([]))


def test_formulas_are_mathml_without_a_script(site: Path) -> None:
    page = (site / "algorithms/index.html").read_text()
    assert page.count("<math") > 80 and "arithmatex" not in page
    assert FORMULA.sub(in_mathml, '<span class="arithmatex">\\(a &lt; b\\)</span>').count("<mi>") == 2

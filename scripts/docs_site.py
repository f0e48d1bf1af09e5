"""Hooks of mkdocs: see mkdocs.yml.

Pages link to other files of the repository by relative paths, which a forge resolves itself. The site gets copies of these files,
and three pages from the repository's top folder. Formulas become MathML, which browsers render without a script.
"""

import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
TOP_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
COPIES = "files"
"""The site's folder for copies; it contains no pages."""
LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)#\s]+)")
FENCED = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"<(span|div) class=\"arithmatex\">\\[(\[](.*?)\\[)\]]</\1>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/ to the site's copies. Code blocks stay unchanged."""
    source = Path(page.file.abs_src_path or "")
    here = posixpath.dirname(page.file.src_uri)

    def follow(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if target.is_relative_to(config.docs_dir):
            place = target.relative_to(config.docs_dir).as_posix()
        else:
            place = copy_of(target, source, config, files)
        return link[1] + posixpath.relpath(place, here or ".")

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(follow, part) for part in parts)


def copy_of(target: Path, source: Path, config: MkDocsConfig, files: Files) -> str:
    """Path within the site of a file of the repository."""
    if not target.is_relative_to(ROOT) or not target.is_file():
        raise PluginError(f"{source.relative_to(ROOT)} links to {target}, which is no file of the repository")
    name = target.relative_to(ROOT).as_posix()
    if name in TOP_PAGES:
        return name
    place = f"{COPIES}/{name}.txt" if not target.suffix or target.suffix in (".py", ".sh", ".yaml", ".md") else f"{COPIES}/{name}"
    if files.get_file_from_path(place) is None:
        files.append(File.generated(config, place, abs_src_path=str(target)))
    return place


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return FORMULA.sub(in_mathml, content)


def in_mathml(formula: re.Match[str]) -> str:
    return convert(html.unescape(formula[2]), display="block" if formula[1] == "div" else "inline")

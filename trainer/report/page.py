"""Render HTML pages from templates: page.html.j2 and the templates that extend it."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from trainer.tracking.conversation import split_prompt
from trainer.tracking.formatting import duration, number


def render(template: str, **values: Any) -> str:
    """Render a template below trainer/ to a self-contained page. All values are escaped; a missing one raises an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    # autoescape: pages show text of models and data sets, which must not become markup.
    environment = Environment(
        loader=PackageLoader("trainer", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "duration": duration, "split_prompt": split_prompt}
    return environment

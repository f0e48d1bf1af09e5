"""Templates of the pages that programs write: page.html.j2 and what extends it."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from trainer.tracking.formatting import duration, number


def render(template: str, **values: Any) -> str:
    """A template below trainer/; one page without outside parts. Everything is escaped; a missing value is an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trainer", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "duration": duration}
    return environment

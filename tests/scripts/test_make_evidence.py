"""docs/evidence.md is up to date with docs/evidence/*.yaml."""

import re

import yaml

from scripts.make_evidence import FOLDER, ORIGIN, PAGE, evidence_page

GROUPS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == evidence_page(), "run python -m scripts.make_evidence"


def test_every_row_has_all_columns_and_an_origin() -> None:
    for name, group in GROUPS.items():
        assert group.keys() <= {"title", "machine", "text", "rows"}, name
        for row in group["rows"]:
            assert row.keys() == group["rows"][0].keys() >= {*ORIGIN}, (name, row)
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) and re.fullmatch(r"[0-9a-f]{7,}", row["commit"]), (name, row)

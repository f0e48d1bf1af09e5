import json
from pathlib import Path
from xml.etree import ElementTree

from scripts.bench.step_picture import PARTS, PHASES, QUICK, draw, main, measure
from tests.layout.source import ROOT

NUMBERS = json.loads((ROOT / "docs/step.json").read_text())
NAMES = [name for name, *_ in PARTS]


def largest(phase: str, part: str, numbers: dict = NUMBERS) -> float:
    """Maximum MB of ``part`` during ``phase``."""
    spans = [(start, end) for name, start, end in numbers["spans"] if name == phase]
    column = 1 + NAMES.index(part)
    return max(look[column] for look in numbers["looks"] if any(start <= look[0] <= end for start, end in spans))


def test_committed_picture_is_drawn_from_the_committed_numbers() -> None:
    assert (ROOT / "docs/step.svg").read_text() == draw(NUMBERS)


def test_numbers_agree_with_the_text_of_the_page() -> None:
    """docs/concepts.md: this order of phases; the engine sleeps while models work; memory peaks in the update."""
    phases = list(dict.fromkeys(phase for phase, *_ in NUMBERS["spans"]))
    assert phases == [phase for phase in PHASES if phase in phases] and {"gen", "ref", "update_actor", "sync"} <= {*phases}
    assert largest("gen", "engine") > 100 and largest("gen", "cache") > 0 and largest("gen", "gradients") == 0
    assert largest("update_actor", "engine") == largest("update_actor", "cache") == 0
    fullest = max(NUMBERS["looks"], key=lambda look: sum(look[1:]))[0]
    (update,) = ((start, end) for phase, start, end in NUMBERS["spans"] if phase == "update_actor")
    assert update[0] <= fullest <= update[1]
    weights = NUMBERS["parameters"] * 4 / 1e6
    assert abs(largest("ref", "ref") - weights) < 1 and abs(largest("update_actor", "moments") - 2 * weights) < 1


def test_quick_measurement_can_be_drawn(tmp_path: Path) -> None:
    numbers = measure(QUICK)
    assert [phase for phase, *_ in numbers["spans"]][-1] == "sync" and numbers["looks"]
    assert all(min(look) >= 0 and look[0] <= numbers["seconds"] for look in numbers["looks"])
    (tmp_path / "step.json").write_text(json.dumps(numbers))
    main(["draw", str(tmp_path / "step.json"), str(tmp_path / "step.svg")])
    ElementTree.parse(tmp_path / "step.svg")

"""Writes docs/config.md from the comments of the YAML, and the tables of docs/coming_from_verl.md from configs/compat.yaml.

python -m scripts.make_config_docs
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from configs.argv import configs_of, groups_of
from configs.compat import Accepted, Differs, Translated, as_typed, compat
from configs.keys import CONFIG_DIR, Described, described

DOCS = CONFIG_DIR.parent / "docs"
CONFIG_PAGE, VERL_PAGE = DOCS / "config.md", DOCS / "coming_from_verl.md"
MAIN = "ppo_trainer"
PROGRAMS = {
    MAIN: "trainer.main_ppo",
    "sft_trainer": "trainer.main_sft",
    "reward_model_trainer": "trainer.main_reward_model",
    "generation": "trainer.main_generation",
    "evaluation": "trainer.main_eval",
    "serve_reward": "trainer.main_serve_reward",
    "parity": "trainer.main_parity",
    "export": "trainer.main_export",
}
"""Root YAML: the program that reads it."""
BEGIN, END = "<!-- {}: from configs/compat.yaml -->", "<!-- end -->"

TOP = """\
# Every key

Written by `python -m scripts.make_config_docs` from the comments in `configs/`, the only home of a default. A key is
set on the command line, `key=value`; `null` is no value, `${other.key}` is what that key says. A block in braces, or `{}`, holds
what differs from what its line says; its keys are set one by one all the same. Keys of verl that are not here:
[coming_from_verl.md](coming_from_verl.md).
"""


def config_page() -> str:
    """docs/config.md."""
    main = described(CONFIG_DIR / f"{MAIN}.yaml")
    lines = [TOP]
    for root, program in PROGRAMS.items():
        leaves = described(CONFIG_DIR / f"{root}.yaml")
        shared = {key for key, leaf in leaves.items() if root != MAIN and key in main and main[key].value == leaf.value}
        lines += [f"## {program}", "", _about(root, len(leaves), len(shared)), ""]
        blocks: dict[str, dict[str, Described]] = {}
        for key, leaf in leaves.items():
            if key not in shared:
                blocks.setdefault(_block(key), {})[key] = replace(leaf, comment=_comment(key, leaves, main))
        for block, own in blocks.items():
            lines += [f"### {block}", "", *_table(("key", "default", "what it does"), _rows(own)), ""]
    return "\n".join(lines).rstrip() + "\n"


def verl_page(page: str) -> str:
    """docs/coming_from_verl.md, given as it stands, with its tables anew."""
    names = compat()
    tables: dict[str, Iterable[tuple[str, ...]]] = {
        "other names": [(_code(theirs), _code(ours)) for theirs, ours in names.alias.items()],
        "translated": [row for key, entry in names.translated.items() for row in _translated_rows(key, entry)],
        "numbers": [(_code(key), _when(entry), entry.why) for key, entry in names.numbers.items()],
        "left out": [(_code(key), _values(entry), entry.why) for key, entry in names.accepted.items()],
        "refused": [
            *((_code(key), advice) for key, advice in names.refused.items()),
            *((_code(key), entry.otherwise) for key, entry in names.accepted.items() if entry.otherwise),
            *((_code(key), entry.otherwise) for key, entry in names.translated.items() if entry.otherwise),
            *((_code(f"{key}={value}"), why) for key, values in names.values.items() for value, why in values.items()),
        ],
    }
    heads = {
        "other names": ("verl", "here"),
        "translated": ("verl", "here", "why"),
        "numbers": ("key", "values", "what differs"),
        "left out": ("key", "values", "why it changes no result"),
        "refused": ("key", "what to do"),
    }
    for name, rows in tables.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"{VERL_PAGE}: there is no {BEGIN.format(name)} with {END} after it")
        page = "\n".join((before + begin, "", *_table(heads[name], rows), "", end + after))
    return page


def _about(root: str, keys: int, shared: int) -> str:
    groups = ", ".join(f"`{group}=...`" for group in groups_of(root))
    others = ", ".join(f"`--config-name={name}`" for name in configs_of(root)[1:])
    said = f"`configs/{root}.yaml`, {keys} keys"
    said += f"; the {shared} that are as in `{PROGRAMS[MAIN]}` are not repeated." if shared else "."
    return " ".join(part for part in (said, f"Groups: {groups}." if groups else "", f"Also {others}." if others else "") if part)


def _comment(key: str, leaves: Mapping[str, Described], main: Mapping[str, Described]) -> str:
    """Its own, or that of the same key in training, or of one of the same name."""
    last = key.rpartition(".")[2]
    same_name = (other for tree in (leaves, main) for name, other in tree.items() if name.rpartition(".")[2] == last)
    return next((leaf.comment for leaf in (leaves[key], main.get(key), *same_name) if leaf is not None and leaf.comment), "")


def _block(key: str) -> str:
    """What a table is about: the first parts of the key, without its last."""
    *above, _ = key.split(".")
    return ".".join(above[:2]) or key


def _rows(leaves: Mapping[str, Described]) -> list[tuple[str, str, str]]:
    return [(_code(key), _code(_short(leaf.value)), leaf.comment) for key, leaf in leaves.items()]


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:50]} ..."


def _values(entry: Accepted) -> str:
    return "any" if entry.values is None else ", ".join(_code(as_typed(value)) for value in entry.values)


def _when(entry: Differs) -> str:
    if entry.values is not None:
        return ", ".join(_code(as_typed(value)) for value in entry.values)
    return f"any but {', '.join(_code(as_typed(value)) for value in entry.unless)}" if entry.unless else "any"


def _translated_rows(key: str, entry: Translated) -> Iterable[tuple[str, str, str]]:
    for case in entry.cases:
        theirs = "any other" if case.values is None else ", ".join(map(as_typed, case.values))
        ours = "<br>".join(_code(f"{name}={as_typed(value)}") for name, value in {**case.sets, **case.forces}.items())
        yield _code(f"{key}={theirs}"), ours or "left out", entry.why


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _code(text: str) -> str:
    return f"`{text}`"


def main() -> None:
    pages: dict[Path, str] = {CONFIG_PAGE: config_page(), VERL_PAGE: verl_page(VERL_PAGE.read_text(encoding="utf-8"))}
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

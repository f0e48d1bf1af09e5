"""Write the folder of a new task: the files of a template, with the sizes of this machine filled in."""

import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from trainer.new_task.sizes import LocalMachine, sizes

TEMPLATES = ("own", "chat", "tool", "gsm8k", "preferences")
HOME = files("data_preprocess.new_task")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def defaults() -> dict[str, dict[str, Any]]:
    """The sizes of data_preprocess/new_task/sizes.yaml."""
    read: dict[str, dict[str, Any]] = yaml.safe_load((HOME / "sizes.yaml").read_text(encoding="utf-8"))
    return read


def create(folder: Path, template: str, machine: LocalMachine) -> list[Path]:
    """Write ``folder`` and return its files. Raises ValueError, one line, for a bad name or if something is there already."""
    if not NAME.fullmatch(folder.name):
        raise ValueError(f"{folder}: a task's name has letters, digits, - and _, and begins with a letter")
    if folder.exists():
        raise ValueError(f"{folder} exists already, and nothing in it was changed; take another name")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"{folder}: there is no directory {folder.parent} to write it into")
    values = {"name": folder.name, **sizes(machine, defaults(), template)}
    values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}  # as in YAML
    kind, other = ("gpu", "cpu") if machine.gpus else ("cpu", "gpu")
    texts = {}
    for file in (HOME / template).iterdir():
        if file.name.startswith("__") or f".{other}." in file.name:
            continue
        text = file.read_text(encoding="utf-8")
        texts[file.name.replace(f".{kind}.", ".")] = text if file.name.endswith(".py") else Template(text).substitute(values)
    folder.mkdir()
    for name, text in sorted(texts.items()):
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(folder.iterdir())

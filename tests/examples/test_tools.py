"""The tool files of the experiments."""

from pathlib import Path

import pytest

from data_preprocess import gsm8k
from tests.layout.source import ROOT
from trainer.agents.verl_modules import load_tools

NAMES = {"gsm8k": gsm8k.TOOL, "python": "python", "search": "search"}


@pytest.mark.parametrize("path", sorted((ROOT / "examples/tools").iterdir()), ids=lambda path: path.stem)
def test_tool_file_loads_and_names_the_tool_that_rows_and_prompts_name(path: Path) -> None:
    (tool,) = load_tools(str(path), "tool_config_path")
    assert tool.name == NAMES[path.stem]

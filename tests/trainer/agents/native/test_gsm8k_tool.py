"""The GSM8K tool, by the name that verl's files have for it."""

import json
from pathlib import Path

from tests.trainer.agents.tool_sessions import use
from trainer.agents.verl_modules import load_tools


def test_gsm8k_tool_of_verls_example_scores_as_verl_does(tmp_path: Path) -> None:
    """The YAML file of verl's example names verl's class; without verl it is the one here."""
    path = tmp_path / "tools.yaml"
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    function = {"name": "calc_gsm8k_reward", "description": "Check.", "parameters": schema}
    entry = {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"},
             "tool_schema": {"type": "function", "function": function}}  # fmt: skip
    path.write_text(json.dumps({"tools": [entry]}))
    (tool,) = load_tools(str(path), "tool_config_path")
    answers = [{"answer": text} for text in ("71", "#### 72", "72", "3")]
    found, box = use(tool, *answers, kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}})
    # A reward only for an improvement.
    assert [result.reward for result in found] == [-0.05, 0.0, -0.05, -0.05]
    assert found[1].text == "Current parsed answer='#### 72' reward=1.0" and box.rewards == {"calc_gsm8k_reward": 0.0}
    _, box = use(tool)
    assert box.rewards == {} and box.counts == {"create": 1}

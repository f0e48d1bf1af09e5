"""Stand-ins for verl's modules."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from trainer.run.user_code import load_function
from trainer.run.verl_names import _NAMES, verl_modules


def no_trace_of_verl() -> bool:
    return not any(name == "verl" or name.startswith("verl.") for name in sys.modules)


def test_modules_of_verl_are_there_only_while_files_are_loaded() -> None:
    assert no_trace_of_verl()
    with verl_modules():
        base_tool, trace = import_module("verl.tools.base_tool"), import_module("verl.utils.rollout_trace")
        with verl_modules():
            schemas = import_module("verl.tools.schemas")
        assert import_module("verl").tools.schemas is schemas and schemas.ToolResponse is base_tool.ToolResponse
        assert trace.rollout_trace_op(base_tool.BaseTool.execute) is base_tool.BaseTool.execute
    assert no_trace_of_verl()
    with pytest.raises(ModuleNotFoundError):
        import_module("verl.tools")


def test_token_output_has_the_modules_of_two_versions_of_verl() -> None:
    with verl_modules():
        replica, loop = import_module("verl.workers.rollout.replica"), import_module("verl.experimental.agent_loop.agent_loop")
        assert replica.TokenOutput is loop.TokenOutput


def test_every_name_can_be_imported() -> None:
    with verl_modules():
        for module, names in _NAMES.items():
            found = import_module(module)
            assert [callable(getattr(found, name)) for name in names] == [True] * len(names)
            scope: dict[str, object] = {}
            exec(f"from {module} import *", scope)
            assert names.keys() <= scope.keys()
        with pytest.raises(ImportError, match="cannot import name 'Absent'"):
            exec("from verl.tools.schemas import Absent")


def test_a_reward_function_may_import_verls_names(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "from verl.utils.reward_score import math_dapo\n\n\ndef score(text):\n    return math_dapo.compute_score(text, '4')\n"
    )
    assert load_function(str(file), "score", "key")("Answer: 4")["acc"] and no_trace_of_verl()

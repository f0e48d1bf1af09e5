"""verl's own tool and interaction files, unmodified, without verl.

VERL_CHECKOUTS names a directory with a checkout of verl per version, such as v0.4.0 to v0.9.0; without it nothing runs.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.agents.tool_sessions import use
from trainer.agents.interactions import InteractionSession, UserReply
from trainer.agents.isolation import SessionLoop
from trainer.agents.tools import AnyTool
from trainer.agents.verl_modules import load_function_tools, load_interactions, load_tools

pytestmark = pytest.mark.soak
VERSIONS = sorted(path for path in Path(os.environ["VERL_CHECKOUTS"]).iterdir()) if "VERL_CHECKOUTS" in os.environ else []
CONFIGS = "examples/sglang_multiturn/config"
WRONG, RIGHT = "I think #### 3", "So it is #### 4"


def files(pattern: str) -> Any:
    """Parameters: the files of all versions; at least one, so that a moved file is noticed."""
    found = [
        pytest.param(file, id=str(file.relative_to(root.parent))) for root in VERSIONS for file in sorted(root.glob(pattern))
    ]
    assert found or not VERSIONS, pattern
    return pytest.mark.parametrize("file", found or [pytest.param(None, marks=pytest.mark.skip("VERL_CHECKOUTS is not set"))])


def written(folder: Path, section: str, class_name: str, **entry: Any) -> str:
    file = folder / "file.yaml"
    file.write_text(yaml.safe_dump({section: [{"class_name": class_name, "config": {}, **entry}]}))
    return str(file)


def converse(file: str, name: str, *turns: list[dict[str, Any]]) -> list[UserReply]:
    async def main() -> list[UserReply]:
        loop = SessionLoop()
        interaction, kwargs = load_interactions(file, "interaction_config_path")[name], {"name": name, "ground_truth": "4"}
        async with InteractionSession(interaction, loop, session="s", kwargs=kwargs, seconds=60.0) as session:
            found = [await session.reply(messages) for messages in turns]
        loop.close()
        assert session.error is None
        return found

    return asyncio.run(main())


def dialogue(text: str) -> list[dict[str, Any]]:
    # Version 0.4.1 of the interaction scores the user's message.
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]


def checks_answers(tool: AnyTool) -> None:
    kwargs = {tool.name: {"create_kwargs": {"ground_truth": "4"}}}
    found, box = use(tool, {"answer": "3"}, {"answer": "4"}, kwargs=kwargs)
    assert [(result.status, result.reward) for result in found] == [("ok", -0.05), ("ok", 0.0)]
    assert "4" in found[1].text and box.rewards == {tool.name: 1.0}


@files("verl/tools/gsm8k_tool.py")
def test_class_of_the_gsm8k_tool(file: Path, tmp_path: Path) -> None:
    (schema,) = yaml.safe_load((file.parents[2] / CONFIGS / "tool_config/gsm8k_tool_config.yaml").read_text())["tools"]
    (tool,) = load_tools(written(tmp_path, "tools", f"{file}:Gsm8kTool", tool_schema=schema["tool_schema"]), "tool_config_path")
    checks_answers(tool)


@files("recipe/partial_rollout/tools/gsm8k_tool.py")
def test_class_of_a_recipes_gsm8k_tool(file: Path, tmp_path: Path) -> None:
    (schema,) = yaml.safe_load((file.parents[1] / "run/gsm8k_tool_config.yaml").read_text())["tools"]
    (tool,) = load_tools(written(tmp_path, "tools", f"{file}:Gsm8kTool", tool_schema=schema["tool_schema"]), "tool_config_path")
    checks_answers(tool)


@files("verl/interactions/gsm8k_interaction.py")
def test_class_of_the_gsm8k_interaction(file: Path, tmp_path: Path) -> None:
    path = written(tmp_path, "interaction", f"{file}:Gsm8kInteraction", name="gsm8k")
    wrong, right = converse(path, "gsm8k", dialogue(WRONG), dialogue(RIGHT))
    assert (wrong.done, wrong.score, right.done, right.score) == (False, 0.0, True, 1.0)


@files("verl/interactions/weather_interaction.py")
def test_class_of_the_weather_interaction(file: Path, tmp_path: Path) -> None:
    path = written(tmp_path, "interaction", f"{file}:WeatherInteraction")
    without, after = converse(path, "weather", dialogue("Sunny."), [{"role": "tool", "content": "17 degrees"}, *dialogue("17.")])
    assert (without.done, without.score, after.score) == (True, 0.0, 1.0)


@files("tests/experimental/agent_loop/function_tool_examples.py")
def test_function_tools(file: Path) -> None:
    tools = {tool.name: tool for tool in load_function_tools(str(file), "function_tool_path")}
    assert use(tools["calculator"], {"expression": "(3+4)*5"})[0][0].text == "35"
    assert "drizzle" in use(tools["get_weather"], {"city": "Tokyo"})[0][0].text
    assert use(tools["fetch_url"], {"url": "http://a"})[0][0].status == "ok"


@files("tests/tools/_stub_search_tools.py")
def test_classes_of_tools_in_verls_tests(file: Path, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"query_list": {"type": "array", "items": {"type": "string"}}}}
    schema = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": parameters}}
    (tool,) = load_tools(written(tmp_path, "tools", f"{file}:StubSearchTool", tool_schema=schema), "tool_config_path")
    assert use(tool, {"query_list": ["a", "b"]})[0][0].text == "hits-for:a; hits-for:b"


@files(f"{CONFIGS}/tool_config/gsm8k_tool_config.yaml")
def test_file_of_the_gsm8k_tool(file: Path) -> None:
    (tool,) = load_tools(str(file), "tool_config_path")
    checks_answers(tool)


@files(f"{CONFIGS}/tool_config/sandbox_fusion_tool_config.yaml")
def test_file_of_the_sandbox(file: Path) -> None:
    (tool,) = load_tools(str(file), "tool_config_path")
    assert use(tool, {"code": "print(6 * 7)"})[0][0].text == "42\n"


@files(f"{CONFIGS}/tool_config/search_tool_config.yaml")
def test_file_of_the_search_tool(file: Path) -> None:
    """Loaded only: it needs a server."""
    assert [tool.name for tool in load_tools(str(file), "tool_config_path")] == ["search"]


@files(f"{CONFIGS}/interaction_config/gsm8k_interaction_config.yaml")
def test_file_of_the_gsm8k_interaction(file: Path) -> None:
    wrong, right = converse(str(file), "gsm8k", dialogue(WRONG), dialogue(RIGHT))
    assert (wrong.done, wrong.score, right.done, right.score) == (False, 0.0, True, 1.0)

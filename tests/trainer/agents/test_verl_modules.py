"""Files written for verl: tools, function tools and interactions run without it."""

import asyncio
import sys
import threading
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from trainer.agents.formats import ToolCall
from trainer.agents.interactions import BaseInteraction, InteractionSession, UserReply
from trainer.agents.isolation import SessionLoop
from trainer.agents.toolbox import ToolBox, ToolLimits, ToolResult
from trainer.agents.tools import AnyTool, StatefulTool
from trainer.agents.verl_modules import load_function_tools, load_interactions, load_tools

LIMITS = ToolLimits(max_parallel_calls=1, max_tool_response_length=256, tool_response_truncate_side="middle", seconds=60.0)
TOOL = '''
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class GuessTool(BaseTool):
    """In the form of verl's examples."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        assert isinstance(tool_schema, OpenAIFunctionToolSchema) and tool_schema.function.parameters.required == ["guess"]
        self._instances = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instances[instance_id] = {"truth": kwargs.get("create_kwargs", {}).get("ground_truth"), "tries": 0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        state = self._instances[instance_id]
        state["tries"] += 1
        right = parameters["guess"] == state["truth"]
        return ToolResponse(text=f"{self.config['word']}: {right}"), 0.0 if right else -0.05, {"tries": state["tries"]}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 1.0 / self._instances[instance_id]["tries"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]
'''
YAML = """
tools:
  - class_name: "{name}"
    config:
      type: native
      word: Right
    tool_schema:
      type: "function"
      function:
        name: "guess"
        description: "Guess a number."
        parameters:
          type: "object"
          properties:
            guess: {{type: "integer", description: "The guess", minimum: 0}}
          required: ["guess"]
"""
FUNCTIONS = '''
import asyncio

from verl.tools.function_tool import function_tool


@function_tool
def double(number: int) -> dict:
    """Double a number.

    Args:
        number: The number.
    """
    return {"doubled": helper(number)}


@function_tool("wait")
async def pause(text: str = "x") -> tuple:
    """Wait.

    Args:
        text: Returned after it.
    """
    await asyncio.sleep(0)
    return text, 0.5


def helper(number):
    return 2 * number
'''
INTERACTION = """
from verl.interactions.base import BaseInteraction


class TeacherInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instances = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self._instances[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        text = messages[-1]["content"]
        if text == "fail":
            raise RuntimeError("no teacher")
        right = text == self._instances[instance_id]
        return right, f"{self.name}: {right}", float(right), {}

    async def calculate_score(self, instance_id, **kwargs):
        return 1.0

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._instances[instance_id]
"""


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(folder / name)


def use(tools: list[AnyTool], *calls: ToolCall, kwargs: Any = None) -> tuple[list[ToolResult], dict[str, float]]:
    async def main() -> tuple[list[ToolResult], dict[str, float]]:
        loop = SessionLoop()
        async with ToolBox(tools, LIMITS, session="s", loop=loop, kwargs=kwargs) as box:
            found = [result for call in calls for result in await box.run([call])]
        loop.close()
        return found, box.rewards

    return asyncio.run(main())


def no_trace_of_verl() -> bool:
    return not any(name == "verl" or name.startswith("verl.") for name in sys.modules)


@pytest.mark.parametrize("as_module", [True, False])
def test_a_tool_of_verl_runs_from_a_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_module: bool) -> None:
    file = write(tmp_path, "my_verl_tools.py", TOOL)
    monkeypatch.syspath_prepend(tmp_path)
    name = "my_verl_tools.GuessTool" if as_module else f"{file}:GuessTool"
    tools = load_tools(write(tmp_path, "tools.yaml", YAML.format(name=name)), "tool_config_path")
    assert no_trace_of_verl()
    kwargs = {"guess": {"create_kwargs": {"ground_truth": 7}}}
    calls = [ToolCall("a", "guess", {"guess": 3}), ToolCall("b", "guess", {"guess": 7}), ToolCall("c", "guess", {"guess": -7})]
    found, rewards = use(tools, *calls, kwargs=kwargs)
    assert found[:2] == [
        ToolResult("a", "guess", "ok", "Right: False", -0.05, {"tries": 1.0}),
        ToolResult("b", "guess", "ok", "Right: True", 0.0, {"tries": 2.0}),
    ]
    # verl drops what its schema classes do not know, such as minimum.
    assert found[2].text == "Error: wrong arguments for guess: guess: -7 is less than the minimum of 0"
    assert rewards == {"guess": 0.5}
    sys.modules.pop("my_verl_tools", None)


def test_function_tools_of_verl_run_from_a_file(tmp_path: Path) -> None:
    tools = load_function_tools(write(tmp_path, "functions.py", FUNCTIONS), "function_tool_path")
    assert no_trace_of_verl() and [tool.name for tool in tools] == ["double", "wait"]
    found, _ = use(tools, ToolCall("a", "double", {"number": 4}), ToolCall("b", "wait", {}))
    assert [(result.text, result.reward) for result in found] == [('{"doubled": 8}', 0.0), ("x", 0.5)]
    again = load_function_tools(str(tmp_path / "functions.py"), "function_tool_path")
    assert again == tools


def test_an_interaction_of_verl_runs_from_a_yaml_file(tmp_path: Path) -> None:
    file = write(tmp_path, "teacher.py", INTERACTION)
    path = write(tmp_path, "interaction.yaml", f'interaction:\n  - class_name: "{file}:TeacherInteraction"\n    config: {{}}\n')
    interactions = load_interactions(path, "interaction_config_path")
    assert no_trace_of_verl() and [*interactions] == ["teacher"]
    teacher = interactions["teacher"]

    async def main() -> tuple[list[UserReply], str | None]:
        loop = SessionLoop()
        kwargs = {"name": "teacher", "ground_truth": "4"}
        async with InteractionSession(teacher, loop, session="s", kwargs=kwargs, seconds=60.0) as session:
            replies = [await session.reply([{"role": "assistant", "content": text}]) for text in ("3", "4", "fail", "4")]
        loop.close()
        return replies, session.error

    replies, error = asyncio.run(main())
    assert replies[:2] == [UserReply(False, "teacher: False", 0.0), UserReply(True, "teacher: True", 1.0)]
    assert error is not None and error.startswith("interaction teacher: RuntimeError: no teacher (teacher.py:")
    assert replies[2:] == [UserReply(True, "", None, error)] * 2
    assert teacher._instances == {}


NEIGHBOURS = """
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

from .base_tool import BaseTool
from .schemas import OpenAIFunctionToolSchema, ToolResponse


class ScoreTool(BaseTool):
    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        texts = ("#### 7", "#### 8", "7")
        scores = [gsm8k.compute_score(text, "7", method="strict", format_score=0.1, score=2.0) for text in texts]
        return ToolResponse(text=str(scores)), 0.0, {}
"""


def test_a_file_in_verls_folder_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "verl" / "tools").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    file = write(tmp_path / "verl" / "tools", "score_tool.py", NEIGHBOURS)
    (tool,) = load_tools(write(tmp_path, "tools.yaml", YAML.format(name=f"{file}:ScoreTool")), "tool_config_path")
    (found,), _ = use([tool], ToolCall("a", "guess", {"guess": 1}))
    assert found.text == "[2.0, 0.1, 0.0]"
    elsewhere = write(tmp_path / "own", "score_tool.py", NEIGHBOURS)
    with pytest.raises(ValueError, match="does not load: ImportError: attempted relative import"):
        load_tools(write(tmp_path, "tools.yaml", YAML.format(name=f"{elsewhere}:ScoreTool")), "tool_config_path")
    for name in [name for name in sys.modules if name.startswith("verl.tools.user_")]:
        del sys.modules[name]


def test_an_installed_verl_is_used_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verl", "verl/tools", "verl/utils"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "__init__.py", "")
    write(tmp_path, "verl/utils/rollout_trace.py", "rollout_trace_op = lambda function: function\n")
    schemas = """
        from trainer.agents.tools import OpenAIFunctionToolSchema as Same, ToolResponse
        class OpenAIFunctionToolSchema(Same):
            installed: bool = True
        """
    base_tool = """
        class BaseTool:
            def __init__(self, config, tool_schema):
                assert tool_schema.installed
                self.config, self.tool_schema, self.name = config, tool_schema, tool_schema.function.name
        """
    write(tmp_path, "verl/tools/schemas.py", dedent(schemas))
    write(tmp_path, "verl/tools/base_tool.py", dedent(base_tool))
    file = write(tmp_path, "with_verl.py", TOOL)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        (tool,) = load_tools(write(tmp_path, "tools.yaml", YAML.format(name=f"{file}:GuessTool")), "tool_config_path")
        assert isinstance(tool, StatefulTool) and tool.name == "guess"
        assert type(tool.base).__mro__[1] is sys.modules["verl.tools.base_tool"].BaseTool
        assert sys.modules["verl"].__file__ == str(tmp_path / "verl/__init__.py")
    finally:
        for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.GuessTool", YAML, "No module named 'absent'"),
        ("json.GuessTool", YAML, "json has no class GuessTool"),
        ("FILE:Nothing", YAML, "has no class Nothing"),
        ("verl.tools.mcp_base_tool.MCPBaseTool", YAML, "verl is not installed, and without it there are .*verl.tools.base_tool"),
        ("FILE:GuessTool", YAML.replace("native", "grpc"), r"tools\[0\]\.config\.type=grpc: it must be native or mcp"),
        ("FILE:GuessTool", YAML.replace('["guess"]', '["other"]'), r"GuessTool cannot be created: AssertionError"),
        ("FILE:GuessTool", YAML.split("    tool_schema")[0], "GuessTool cannot be created"),
        ("FILE:GuessTool", "tools: 3", "it must have a list «tools»"),
        ("FILE:GuessTool", "tools: [", "not YAML"),
        ("FILE:GuessTool", "tools: \udcff", "not YAML"),
        ("FILE:GuessTool", "tools: [{{class_name: a.B, config: native}}]", "it must have a list «tools»"),
        ("FILE:GuessTool", YAML + YAML.replace("tools:", ""), "two tools of the name guess"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = write(tmp_path, "own_tools.py", TOOL)
    path = write(tmp_path, "tools.yaml", text.format(name=name.replace("FILE", file)) if "{" in text else text)
    with pytest.raises(ValueError, match=message) as caught:
        load_tools(path, "tool_config_path")
    assert str(caught.value).startswith(f"tool_config_path={path}") and "\n" not in str(caught.value)
    assert no_trace_of_verl()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "has no tool; write @tool"),
        (
            "from verl.tools.function_tool import function_tool\n@function_tool\ndef f(a): 'F.'\n",
            "does not load: ValueError: tool f: ",
        ),
        ("import verl.models\n", "verl is not installed"),
        (FUNCTIONS.replace('"wait"', '"double"'), "two tools of the name double"),
    ],
)
def test_a_file_without_usable_functions_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "functions.py", text)
    with pytest.raises(ValueError, match=message) as caught:
        load_function_tools(path, "function_tool_path")
    assert str(caught.value).startswith(f"function_tool_path={path}") and "\n" not in str(caught.value)


def test_a_folder_of_the_name_is_no_installed_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load_function_tools(write(tmp_path, "functions.py", FUNCTIONS), "function_tool_path")) == 2


def test_functions_that_an_installed_verl_registers_are_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's decorator returns the function itself."""
    installed = """
        from types import SimpleNamespace
        from trainer.agents.tools import OpenAIFunctionToolSchema, function_schema
        FUNCTION_TOOL_REGISTRY = {}

        def function_tool(name=None):
            if callable(name):
                return function_tool(name.__name__)(name)
            def register(fn):
                schema = OpenAIFunctionToolSchema.model_validate(function_schema(fn, name))
                FUNCTION_TOOL_REGISTRY[name] = SimpleNamespace(name=name, fn=fn, tool_schema=schema)
                return fn
            return register

        @function_tool
        def another(): "Of another file."
        """
    for name in ("verl", "verl/tools"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "__init__.py", "")
    write(tmp_path, "verl/tools/function_tool.py", dedent(installed))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        found = load_function_tools(write(tmp_path, "functions.py", FUNCTIONS), "function_tool_path")
    finally:
        for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
            del sys.modules[name]
    assert [tool.name for tool in found] == ["double", "wait"]
    results, _ = use(found, ToolCall("a", "double", {"number": 4}), ToolCall("b", "wait", {}))
    assert [result.text for result in results] == ['{"doubled": 8}', "x"]


class Careless(BaseInteraction):
    """Returns no id, and changes the messages. slow: the method that sets entered, and waits until go is set."""

    def __init__(self, slow: str = "") -> None:
        super().__init__({"name": "careless"})
        self.slow, self.entered, self.go, self.log = slow, threading.Event(), threading.Event(), list[Any]()

    async def pause(self, method: str) -> None:
        if method == self.slow:
            self.entered.set()
            await asyncio.to_thread(self.go.wait, 60)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        self.log.append(kwargs)
        await self.pause("start")

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        messages[0]["content"] = "changed"
        return True, instance_id, 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await self.pause("finalize")
        self.log.append(instance_id)


class Saying(BaseInteraction):
    """A user that says what it is given."""

    def __init__(self, score: Any) -> None:
        super().__init__({})
        self.score = score

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return False, "no \ud83d", self.score, {}


@pytest.mark.parametrize("score", [None, 0.5, float("nan"), "high"])
def test_a_users_reply_is_text_that_a_tokenizer_takes_and_its_score_a_finite_number(score: Any) -> None:
    async def main() -> UserReply:
        loop = SessionLoop()
        async with InteractionSession(Saying(score), loop, session="s", kwargs={}, seconds=60.0) as session:
            reply = await session.reply([{"role": "assistant", "content": "x"}])
        loop.close()
        return reply

    reply = asyncio.run(main())
    if score in (None, 0.5):
        assert reply == UserReply(False, "no ?", score, None)
    else:
        assert reply.done and reply.error is not None and reply.error.endswith(f"the score is {score!r}, not a finite number")


def test_an_interaction_takes_rows_with_any_names_and_messages_of_its_own() -> None:
    careless, row, messages = Careless(), {"seconds": 5, "function": "f", "work": 1}, [{"role": "assistant", "content": "x"}]

    async def main() -> list[UserReply]:
        loop = SessionLoop()
        async with InteractionSession(careless, loop, session="s", kwargs=row, seconds=60.0) as session:
            replies = [await session.reply(messages)]
        async with InteractionSession(careless, loop, session="t", kwargs={"messages": []}, seconds=60.0) as session:
            replies.append(await session.reply(messages))
        loop.close()
        return replies

    good, bad = asyncio.run(main())
    assert good == UserReply(True, "s", 0.0) and messages == [{"role": "assistant", "content": "x"}]
    assert bad.error is not None and bad.error.startswith("interaction careless: TypeError: ")
    assert careless.log == [row, "s", {"messages": []}, "t"]


@pytest.mark.parametrize("method", ["start", "finalize"])
def test_an_interaction_that_is_cancelled_while_it_starts_or_ends_is_finalized(method: str) -> None:
    slow = Careless(method)

    async def main() -> None:
        loop = SessionLoop()

        async def program() -> None:
            async with InteractionSession(slow, loop, session="s", kwargs={}, seconds=60.0):
                pass

        task = asyncio.create_task(program())
        while not slow.entered.is_set():
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.001)
        assert method == "start" or not task.done()
        slow.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop.close()

    asyncio.run(main())
    assert slow.log == [{}, "s"]


def test_the_name_of_an_interaction_is_text(tmp_path: Path) -> None:
    path = write(tmp_path, "interaction.yaml", "interaction:\n  - {name: [1], class_name: a.B}\n")
    with pytest.raises(ValueError, match=r"^interaction_config_path=[^\n]*it must have a list «interaction»"):
        load_interactions(path, "interaction_config_path")


def test_two_interactions_of_a_name_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "teacher.py", INTERACTION)
    entry = f'  - name: a\n    class_name: "{file}:TeacherInteraction"\n'
    with pytest.raises(ValueError, match=r"interaction\[1\]\.name=a: there are two"):
        load_interactions(write(tmp_path, "interaction.yaml", f"interaction:\n{entry}{entry}"), "interaction_config_path")

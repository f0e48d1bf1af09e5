"""Programs in the sandbox."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.agents.tool_sessions import use
from trainer.agents.native.python_tool import PythonTool, SandboxFusionTool
from trainer.agents.tools import StatefulTool
from trainer.agents.verl_modules import load_tools


@pytest.fixture(scope="module")
def python() -> Iterator[StatefulTool]:
    base = PythonTool({"cpu_seconds": 1.0, "processes": 2}, None)
    yield StatefulTool(base)
    base.close()


def test_programs_return_what_they_print_and_their_errors(python: StatefulTool) -> None:
    code = ["print(2**10)", "print('a')\n1/0", "x = (", "import os; os.fork()", "open('/etc/passwd')", "raise SystemExit"]
    found, _ = use(python, *({"code": text} for text in code))
    texts = [result.text for result in found]
    assert texts[0] == "1024\n" and texts[5] == ""
    assert texts[1].startswith("a\nTraceback") and 'File "<program>", line 2' in texts[1] and "ZeroDivisionError" in texts[1]
    assert "SyntaxError" in texts[2] and "forkserver" not in texts[1]
    assert "PermissionError" in texts[3] and "Error" in texts[4]


def test_programs_that_never_end_or_flood_are_ended_and_hold_up_no_other(python: StatefulTool) -> None:
    code = ["while True: pass", "print('ok')", "import os; os._exit(3)", "while True: print('x' * 10**6)"]
    found, _ = use(python, *({"code": text} for text in code), parallel=True)
    texts = [result.text for result in found]
    assert texts[0] in ("[the program was killed by SIGPROF]", "[the program timed out after 3 s]") and texts[1] == "ok\n"
    assert texts[2] == "[the program ended with exit code 3]" and len(texts[3]) < 2_100
    assert [result.status for result in found] == ["ok"] * 4
    assert python.base._idle.qsize() == 2, "the others did not wait for the one that never ends"


def test_a_program_whose_call_is_over_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    base, started = PythonTool({"processes": 1}, None), threading.Event()
    start = base._run
    ended = threading.Event()

    def watched(*args: object) -> str:
        started.set()
        try:
            return start(*args)  # type: ignore[arg-type]
        finally:
            ended.set()

    monkeypatch.setattr(base, "_run", watched)

    async def main() -> None:
        call = asyncio.create_task(base.execute("s", {"code": "print(1)"}))
        while not started.is_set():
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.wait([call])

    with base._slots:
        asyncio.run(main())
    assert ended.wait(60) and base._idle.empty(), "no server was started"
    with pytest.raises(ValueError, match=r"config\.processes=0: at least 1"):
        PythonTool({"processes": 0}, None)


SANDBOX = """
tools:
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {sandbox_fusion_url: "http://localhost:1/run", num_workers: 128, default_timeout: 1, default_language: LANGUAGE}
    tool_schema:
      type: function
      function:
        name: code_interpreter
        description: Run code.
        parameters: {type: object, properties: {code: {type: string, description: The code.}}, required: [code]}
"""


def test_verls_class_of_a_sandbox_service_runs_programs_in_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(SANDBOX.replace("LANGUAGE", "python"))
    (tool,) = load_tools(str(tmp_path / "tools.yaml"), "tool_config_path")
    assert isinstance(tool, StatefulTool) and isinstance(tool.base, SandboxFusionTool) and tool.name == "code_interpreter"
    found, _ = use(tool, {"code": "print(6 * 7)"}, {"code": "while True: pass"})
    assert found[0].text == "42\n" and found[1].text.startswith("[the program ")
    tool.base.close()


def test_other_languages_than_python_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(SANDBOX.replace("LANGUAGE", "cpp"))
    with pytest.raises(ValueError, match="default_language=cpp: the sandbox runs Python only"):
        load_tools(str(tmp_path / "tools.yaml"), "tool_config_path")


LIKE_RETOOL = """
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.rollout_trace import rollout_trace_op


class Printing(SandboxFusionTool):
    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        code = f"print({parameters['code']})"
        return await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language), None, None
"""


def test_a_subclass_uses_the_pool_and_limits_of_verls_class(tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(LIKE_RETOOL)
    named = SANDBOX.replace("LANGUAGE", "python").replace(
        "verl.tools.sandbox_fusion_tools.SandboxFusionTool", f"{tmp_path}/printing.py:Printing"
    )
    (tmp_path / "tools.yaml").write_text(named)
    (tool,) = load_tools(str(tmp_path / "tools.yaml"), "tool_config_path")
    assert isinstance(tool, StatefulTool) and isinstance(tool.base, SandboxFusionTool) and tool.base.default_timeout == 1
    found, _ = use(tool, {"code": "6 * 7"}, {"code": "1)\nwhile True: (0"}, {"code": "1", "language": "cpp"})
    assert found[0].text == "42\n" and found[1].text.startswith("[the program ")
    assert found[2].text.startswith("Error: ")
    tool.base.close()

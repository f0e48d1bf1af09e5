"""Tool that runs Python programs in the sandbox of code rewards: no files, network or processes; limits of time and memory."""

import queue
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from trainer.agents.isolation import in_thread
from trainer.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from trainer.rewards.sandbox.forkserver import ForkServer, JobLimits

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and return what it prints. Nothing is kept between programs.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}
# The sandbox drops stderr: a traceback goes where the output goes.
_PROGRAM = """
import sys, traceback
try:
    exec(compile({code!r}, "<program>", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    frames = error.__traceback__.tb_next if not isinstance(error, SyntaxError) else None
    traceback.print_exception(type(error), error, frames, file=sys.stdout)
"""


class PythonTool(BaseTool):
    """Runs programs, each in a process of its own.

    config: cpu_seconds (5), memory_mb (512), output_kb (64), and processes (4), the programs that run at the same time.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(_SCHEMA))
        self._limits = JobLimits(
            cpu_seconds=float(config.get("cpu_seconds", 5.0)),
            memory_bytes=int(config.get("memory_mb", 512)) << 20,
            output_bytes=int(config.get("output_kb", 64)) << 10,
        )
        # Several servers: each runs one program at a time, and one may take all the time it has.
        processes = int(config.get("processes", 4))
        if processes < 1:
            raise ValueError(f"config.processes={processes}: at least 1 program must be able to run")
        self._slots = threading.BoundedSemaphore(processes)
        self._idle: queue.SimpleQueue[ForkServer] = queue.SimpleQueue()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        gone = threading.Event()
        try:
            return ToolResponse(text=await in_thread(self._run, parameters["code"], gone, self._limits)), 0.0, {}
        finally:
            gone.set()

    def _run(self, code: str, gone: threading.Event, limits: JobLimits) -> str:
        with self._slots:
            if gone.is_set():  # the call exceeded its limit while it waited for a slot
                return ""
            try:
                server = self._idle.get_nowait()
            except queue.Empty:
                server = ForkServer("trainer.rewards.sandbox.sandbox")
            outcome = server.run({"code": _PROGRAM.format(code=code)}, limits)
            # Not after an error, which is the server's: it is closed then.
            self._idle.put(server)
        return outcome.output if outcome.ending is None else f"{outcome.output}\n[the program {outcome.ending}]".lstrip()

    def close(self) -> None:
        """End the idle servers now instead of at the exit of this process."""
        while not self._idle.empty():
            self._idle.get().close()


class SandboxFusionTool(PythonTool):
    """verl's tool of this name, with the sandbox instead of a service.

    config: default_timeout (30 seconds of CPU time) and memory_limit_mb (1024), as in verl, or the keys of PythonTool.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        """Raises ValueError for another language than Python."""
        if (language := config.get("default_language", "python")) != "python":
            raise ValueError(f"config.default_language={language}: the sandbox runs Python only")
        limits = {"cpu_seconds": config.get("default_timeout", 30), "memory_mb": config.get("memory_limit_mb", 1024)}
        super().__init__(limits | config, tool_schema)
        # For subclasses: await self.execution_pool.execute.remote(self.execute_code, id, code, timeout, language)
        self.default_timeout, self.default_language = self._limits.cpu_seconds, language
        self.execution_pool = SimpleNamespace(execute=SimpleNamespace(remote=in_thread))

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """Run a program for at most ``timeout`` seconds of CPU time; for a thread."""
        if language != "python":
            return ToolResponse(text=f"Error: {language} is not supported, only python")
        return ToolResponse(text=self._run(code, threading.Event(), replace(self._limits, cpu_seconds=float(timeout))))

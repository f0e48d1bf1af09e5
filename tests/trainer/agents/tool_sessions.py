"""A session of one tool."""

import asyncio
from typing import Any

from trainer.agents.formats import ToolCall
from trainer.agents.isolation import SessionLoop
from trainer.agents.toolbox import ToolBox, ToolLimits, ToolResult
from trainer.agents.tools import AnyTool


def use(
    tool: AnyTool, *turns: dict[str, Any], kwargs: Any = None, parallel: bool = False, seconds: float = 60.0
) -> tuple[list[ToolResult], ToolBox]:
    """Results of calls with these arguments, one after another or in one turn, and the tool box after its end.

    seconds: limit of a call.
    """

    async def main() -> tuple[list[ToolResult], ToolBox]:
        loop = SessionLoop()
        calls = [ToolCall(f"call_{i}", tool.name, arguments) for i, arguments in enumerate(turns)]
        async with ToolBox([tool], ToolLimits(16, 2_000, "right", seconds), session="s", loop=loop, kwargs=kwargs) as box:
            found = await box.run(calls) if parallel else [result for call in calls for result in await box.run([call])]
        loop.close()
        return found, box

    return asyncio.run(main())

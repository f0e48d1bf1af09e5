"""Agent program: a loop of OpenAI's client with the tools of an MCP server, which is this file too.

    python -m trainer.main_ppo ... actor_rollout_ref.rollout.agent.program=examples/agent_mcp.py:run

It is called once for every response, with the URL and the key under which it reaches the policy. A row may name another server by
its command line, extra_info.server.
"""

import json
import sys
from typing import Any

from mcp import ClientSession, StdioServerParameters, stdio_client
from openai import AsyncOpenAI

CALLS = 4
"""Of the model, at most."""


async def run(base_url: str, api_key: str, task: Any) -> float:
    """Return 1 if the last turn has the row's ground truth."""
    command, *arguments = task.extra_info.get("server") or [sys.executable, __file__]
    messages, text = [*task.prompt], ""
    async with (
        stdio_client(StdioServerParameters(command=command, args=arguments)) as (read, write),
        ClientSession(read, write) as server,
        AsyncOpenAI(base_url=base_url, api_key=api_key) as client,
    ):
        await server.initialize()
        tools = [described(tool) for tool in (await server.list_tools()).tools]
        for _ in range(CALLS):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)  # type: ignore[arg-type]
            message = reply.choices[0].message
            messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            text = message.content or ""
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                content = await result(server, call.function)  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return float(str(task.ground_truth) in text)


def described(tool: Any) -> dict[str, Any]:
    """The tool in the form of OpenAI's protocol."""
    # By the protocol's name: the SDK's differs between its versions.
    schema = tool.model_dump(by_alias=True)["inputSchema"]
    return {"type": "function", "function": {"name": tool.name, "description": tool.description or "", "parameters": schema}}


async def result(server: Any, function: Any) -> str:
    """Text of a call's result; an error is text too, from which the model can learn."""
    try:
        arguments = json.loads(function.arguments)
    except ValueError as error:
        return f"Error: the arguments are not JSON: {error}"
    found = await server.call_tool(function.name, arguments)
    return "\n".join(part.text for part in found.content if part.type == "text")


def serve() -> None:
    """The server, over its pipes."""
    try:
        from mcp.server import MCPServer as Server
    except ImportError:  # version 1
        from mcp.server.fastmcp import FastMCP as Server

    server = Server("arithmetic")

    @server.tool()
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    server.run("stdio")


if __name__ == "__main__":
    serve()

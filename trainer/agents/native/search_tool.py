"""Search tool: a retrieval server with the protocol of Search-R1 (Jin et al. 2025, arXiv:2503.09516), or a local file by BM25."""

import json
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from configs.base.addresses import url_problem
from trainer.agents.isolation import in_thread
from trainer.agents.native.bm25 import Bm25
from trainer.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from trainer.rewards.http_client import RequestRefused, post, with_retries

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search for information.",
        "parameters": {
            "type": "object",
            "properties": {"query_list": {"type": "array", "items": {"type": "string"}, "description": "Complete queries."}},
            "required": ["query_list"],
        },
    },
}


class SearchTool(BaseTool):
    """Returns passages for a list of queries; the name and the configuration are those of verl's tool.

    config: retrieval_service_url, or corpus (a JSONL file with ``contents``: a title, a line break, text); topk (3);
    timeout (30 seconds), retries (3). verl's num_workers and rate_limit have no effect: a call has a thread of its own.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        """Raises ValueError unless one of retrieval_service_url and corpus is given, and for a file that is no corpus."""
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(_SCHEMA))
        self._url, corpus = config.get("retrieval_service_url"), config.get("corpus")
        if (self._url is None) == (corpus is None):
            raise ValueError("config needs one of retrieval_service_url and corpus")
        if self._url is not None and (problem := url_problem(str(self._url))) is not None:
            raise ValueError(f"config.retrieval_service_url{problem}")
        for key, least in (("topk", 1), ("retries", 0), ("timeout", 0.001)):
            if not isinstance(number := config.get(key, 1), int | float) or isinstance(number, bool) or not least <= number < inf:
                raise ValueError(f"config.{key}={number}: must be a number of {least} or more")
        self._topk = int(config.get("topk", 3))
        self._documents = [] if corpus is None else _read(Path(corpus))
        self._index = None if corpus is None else Bm25(self._documents)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        timeout = float(self.config.get("timeout", 30.0))
        queries = parameters["query_list"]
        text, metrics = await in_thread(self.execute_search, instance_id, queries, self._url, self._topk, timeout)
        return ToolResponse(text=text), 0.0, metrics

    def execute_search(
        self, instance_id: str, query_list: Sequence[str], retrieval_service_url: str | None, topk: int, timeout: float
    ) -> tuple[str, dict[str, Any]]:
        """Text of the passages, and metrics. The method that subclasses of verl's tool replace; it runs in a thread."""
        found = self._retrieve(query_list, retrieval_service_url, topk, timeout)
        text = json.dumps({"result": "\n---\n".join(map(_passages, found))}, ensure_ascii=False)
        return text, {"query_count": len(query_list), "total_results": sum(map(len, found))}

    def _retrieve(self, queries: Sequence[str], url: str | None, topk: int, timeout: float) -> list[list[str]]:
        """Documents for each query, best first. Raises ValueError if the server does not reply as the protocol says."""
        if self._index is not None:
            return [[self._documents[i] for i in self._index.search(query, topk)] for query in queries]
        body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode()
        request = partial(post, str(url), body, token=None, timeout=timeout, timeout_key="timeout")
        retries = int(self.config.get("retries", 3))
        try:
            reply = with_retries(request, retries=retries, backoff=0.5)
            found = [[entry["document"]["contents"] for entry in result] for result in reply["result"]]
        except RequestRefused as error:
            raise ValueError(str(error)) from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"{url}: the reply is not {{result: [[{{document: {{contents}}, score}}]]}}") from error
        if len(found) != len(queries):
            raise ValueError(f"{url}: the reply has {len(found)} results for {len(queries)} queries")
        return found


def _passages(documents: Sequence[str]) -> str:
    parts = [document.partition("\n") for document in documents]
    return "\n\n".join(f"Doc {i} (Title: {title})\n{text}" for i, (title, _, text) in enumerate(parts, 1))


def _read(path: Path) -> list[str]:
    try:
        with path.expanduser().open(encoding="utf-8") as lines:
            return [json.loads(line)["contents"] for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"corpus={path}: not a JSONL file with «contents»: {type(error).__name__}: {error}") from error

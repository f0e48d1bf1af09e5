"""Search in a file and over HTTP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agents.tool_sessions import use
from trainer.agents.native.search_tool import SearchTool
from trainer.agents.tools import StatefulTool

CORPUS = ['"Rome"\nRome is in Italy.', '"Paris"\nParis is in France.', '"Nile"\nA river.']
RESULT = 'Doc 1 (Title: "Paris")\nParis is in France.'


def test_search_in_a_file_returns_passages(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in enumerate(CORPUS)))
    tool = StatefulTool(SearchTool({"corpus": str(file), "topk": 1}, None))
    found, _ = use(tool, {"query_list": ["where is Paris?", "river"]}, {"query_list": "Paris"})
    assert json.loads(found[0].text) == {"result": f'{RESULT}\n---\nDoc 1 (Title: "Nile")\nA river.'}
    assert found[0].metrics == {"query_count": 2.0, "total_results": 2.0} and found[1].status == "arguments"
    file.write_text("{}\n")
    with pytest.raises(ValueError, match=r"corpus=.*: not a JSONL file with «contents»"):
        SearchTool({"corpus": str(file)}, None)
    with pytest.raises(ValueError, match="one of retrieval_service_url and corpus"):
        SearchTool({}, None)
    for wrong, message in (
        ({"retrieval_service_url": "127.0.0.1:8000/retrieve"}, "retrieval_service_url=127.0.0.1:8000/retrieve: must be http"),
        ({"retrieval_service_url": ""}, "retrieval_service_url=: must be http"),
        ({"retrieval_service_url": "http://x", "topk": 0}, "config.topk=0: must be a number of 1 or more"),
        ({"retrieval_service_url": "http://x", "timeout": "abc"}, "config.timeout=abc: must be a number"),
        ({"retrieval_service_url": "http://x", "retries": -1}, "config.retries=-1: must be a number of 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            SearchTool(wrong, None)


def test_a_subclass_of_verls_tool_replaces_the_search(tmp_path: Path) -> None:
    class Own(SearchTool):
        def execute_search(self, instance_id: str, query_list: Any, retrieval_service_url: Any, topk: int, timeout: Any) -> Any:
            return f"{query_list} {retrieval_service_url} {topk} {timeout}", {"status": "success", "total_results": 1}

    tool = StatefulTool(Own({"retrieval_service_url": "http://x", "topk": 2, "timeout": 5}, None))
    found, *_ = use(tool, {"query_list": ["Rome"]})
    assert found[0].text == "['Rome'] http://x 2 5.0" and found[0].metrics["total_results"] == 1


def test_search_by_http_follows_the_protocol_of_search_r1() -> None:
    requests: list[Any] = []
    replies: list[tuple[int, Any]] = [
        (503, {}),
        (200, {"result": [[{"document": {"contents": CORPUS[1]}, "score": 0.5}]]}),
        (200, {"results": []}),
        (200, {"result": [[]]}),
    ]

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, reply = replies.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        tool = StatefulTool(SearchTool({"retrieval_service_url": url, "topk": 2}, None))
        found, _ = use(tool, {"query_list": ["Paris"]}, {"query_list": ["Rome"]}, {"query_list": ["a", "b"]})
        server.shutdown()
    assert requests[0] == requests[1] == {"queries": ["Paris"], "topk": 2, "return_scores": True}
    assert json.loads(found[0].text) == {"result": RESULT}
    assert found[1].status == "error" and "the reply is not {result:" in found[1].text
    assert found[2].status == "error" and "the reply has 1 results for 2 queries" in found[2].text

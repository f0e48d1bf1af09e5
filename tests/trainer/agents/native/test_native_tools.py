"""Tools that come with the package: calculator, GSM8K, Python, search."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

from trainer.agents.formats import ToolCall
from trainer.agents.isolation import SessionLoop
from trainer.agents.native.bm25 import Bm25
from trainer.agents.native.calculator import calculator, evaluate
from trainer.agents.native.python_tool import PythonTool
from trainer.agents.native.search_tool import SearchTool
from trainer.agents.toolbox import ToolBox, ToolLimits, ToolResult
from trainer.agents.tools import AnyTool, StatefulTool
from trainer.agents.verl_modules import load_tools


def use(tool: AnyTool, *turns: dict[str, Any], kwargs: Any = None, parallel: bool = False) -> tuple[list[ToolResult], ToolBox]:
    async def main() -> tuple[list[ToolResult], ToolBox]:
        loop = SessionLoop()
        calls = [ToolCall(f"call_{i}", tool.name, arguments) for i, arguments in enumerate(turns)]
        async with ToolBox([tool], ToolLimits(8, 2_000, "right", 60.0), session="s", loop=loop, kwargs=kwargs) as box:
            found = await box.run(calls) if parallel else [result for call in calls for result in await box.run([call])]
        loop.close()
        return found, box

    return asyncio.run(main())


def test_arithmetic_is_that_of_python() -> None:
    rng = Random(0)
    for _ in range(200):
        text = str(rng.randint(0, 20))
        for _ in range(rng.randint(1, 4)):
            text = (
                rng.choice([f"({text})", f"-({text})", text])
                + rng.choice([" + ", "-", "*", " / ", "//", "%"])
                + str(rng.randint(1, 30))
            )
        assert evaluate(text) == eval(text)
    assert (evaluate(" 2**10 "), evaluate("2**-1"), evaluate("1e3")) == (1024, 0.5, 1000.0)
    found, _ = use(calculator, {"expression": "123+456"})
    assert found[0].text == "579"


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9**999999",
        "(2**4000)*(2**4000)",
        "1/0",
        "1e308*10",
        "(-8)**0.5",
        "True",
        "x",
        "print(1)",
        "[1]",
        "'a'*9",
        "1 if 1 else 2",
        "().__class__",
        "",
        "1+",
        "1+" * 600 + "1",
        "(" * 400,
        "1e999",
        "2.0**9999",
    ],
)
def test_everything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        evaluate(text)


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


def test_bm25_scores_are_those_of_the_formula() -> None:
    rng = Random(0)
    documents = [" ".join(rng.choice("abcdef") for _ in range(rng.randint(1, 9))) for _ in range(30)]
    mean = sum(len(document.split()) for document in documents) / len(documents)
    for query in ("a", "b c", "f f e"):
        expected = {}
        for i, document in enumerate(documents):
            words, score = document.split(), 0.0
            for word in query.split():
                n, times = sum(word in other.split() for other in documents), words.count(word)
                idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
                score += idf * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(words) / mean))
            if score > 0:
                expected[i] = score
        found = Bm25(documents).search(query, 30)
        assert dict(found) == pytest.approx(expected, rel=1e-12) and [s for _, s in found] == sorted(
            (s for _, s in found), reverse=True
        )
        assert Bm25(documents).search(query, 2) == found[:2]
    assert Bm25(documents).search("zzz", 3) == []


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


def test_search_by_http_follows_the_protocol_of_search_r1() -> None:
    requests: list[Any] = []
    replies: list[tuple[int, Any]] = [
        (503, {}),
        (200, {"result": [[{"document": {"contents": CORPUS[1]}, "score": 0.5}]]}),
        (200, {"results": []}),
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
        found, _ = use(tool, {"query_list": ["Paris"]}, {"query_list": ["Rome"]})
        server.shutdown()
    assert requests[0] == requests[1] == {"queries": ["Paris"], "topk": 2, "return_scores": True}
    assert json.loads(found[0].text) == {"result": RESULT}
    assert found[1].status == "error" and "the reply is not {result:" in found[1].text

"""Generate the data of `recipe=search_local`: questions that only a search answers. ``Code of kobu?``, response ``482``.

python -m data_preprocess.search_local --local_save_dir DIR writes corpus.jsonl, a document for each town with its code, which is
random; tools.yaml, the search tool of trainer.agents.native with this corpus; train.parquet and test.parquet for RL; and
sft.parquet for the warm start: conversations in which the tool is called, or the answer is ``?``.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data_preprocess.tool_task import ToolTask, write_files
from trainer.agents.native.search_tool import SearchTool
from trainer.agents.tools import StatefulTool
from workers.seeding import seed_of

VOWELS = "aeiou"
TOWNS = ["".join(letters) for letters in product("bcdfghjklmnpqrstvwxz", VOWELS, repeat=2)]
LOWEST, CODES = 100, 900


def main(argv: Sequence[str] | None = None) -> None:
    about = "Generate the task of finding the codes of towns with a search tool"
    write_files(argv, _task, name="search_local", ability="search", problems=len(TOWNS), train_size=1536, about=about)


def _task(args: argparse.Namespace) -> ToolTask:
    """Writes the corpus and the tool's file, too: calls are answered by the tool that RL uses."""
    random = np.random.Generator(np.random.PCG64(seed_of(args.seed, "codes")))
    codes = {town: str(random.integers(LOWEST, LOWEST + CODES)) for town in TOWNS}
    folder = Path(args.local_save_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    documents = [{"id": i, "contents": f"{town}\nThe code of {town} is {code}."} for i, (town, code) in enumerate(codes.items())]
    corpus.write_text("".join(json.dumps(document) + "\n" for document in documents))
    config = {"type": "native", "corpus": str(corpus), "topk": 1}
    named = {"class_name": f"{SearchTool.__module__}.{SearchTool.__name__}", "config": config}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [named]}))
    print(f"{corpus}: {len(documents)} documents")
    tool = SearchTool(config, None)

    def call(query: str) -> tuple[dict[str, Any], str, str]:
        arguments = {"query_list": [query]}
        response, _, _ = asyncio.run(tool.execute("data", arguments))
        assert response.text is not None
        return arguments, response.text, codes[query]

    def problem(number: int) -> tuple[str, str, str]:
        town = TOWNS[number]
        return f"Code of {town}?", town, codes[town]

    return ToolTask(StatefulTool(tool).schema, problem, call, _misread, _guess)


def _misread(query: str, random: np.random.Generator) -> str:
    """The town with another last letter."""
    return query[:-1] + VOWELS[(VOWELS.index(query[-1]) + int(random.integers(1, len(VOWELS)))) % len(VOWELS)]


def _guess(random: np.random.Generator) -> str:
    # Not a code: codes have nine first digits, each less probable than a call, so a greedy model would always call.
    return "?"


if __name__ == "__main__":
    main()

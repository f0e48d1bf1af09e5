"""Model servers over real engines, in this process and as the program."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.model_serving import JSON, TOKEN, address, model_server, post, serve_config, serve_program, tiny_chat_model
from trainer import main_serve
from trainer.serving import model_server as model_server_module
from trainer.serving.model_engine import ModelEngine
from workers.batch import Batch
from workers.seeding import seed_of

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[tuple[str, ModelEngine]]:
    with model_server(f"model={model}", "rollout=embedded", "actor_rollout_ref.rollout.max_num_seqs=16") as found:
        yield found


def ask(url: str, text: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 24, "return_token_ids": True}
    status, reply = post(url, CHAT, body | {"logprobs": True} | changes)
    assert status == 200, reply
    return reply


def sampled(reply: dict[str, Any]) -> list[Any]:
    return [(choice["token_ids"], choice["message"]["content"], choice["finish_reason"]) for choice in reply["choices"]]


def test_a_seed_gives_the_same_answer_alone_and_among_thirty_others(server: tuple[str, ModelEngine]) -> None:
    url, _ = server
    body: dict[str, Any] = {"text": "which?", "seed": 11, "temperature": 0.8, "top_p": 0.9, "n": 2}
    alone = ask(url, **body)
    assert sampled(alone) == sampled(ask(url, **body)) != sampled(ask(url, **body | {"seed": 12}))
    first, second = sampled(alone)
    assert first != second
    with ThreadPoolExecutor(31) as pool:
        others = [pool.submit(ask, url, f"other {i}" * (i % 5), seed=i, max_tokens=8 + i, temperature=1.5) for i in range(30)]
        among = pool.submit(ask, url, **body)
        assert sampled(among.result()) == sampled(alone)
        assert all(other.result()["choices"] for other in others)


def test_requests_without_a_seed_differ_and_greedy_ones_do_not(server: tuple[str, ModelEngine]) -> None:
    url, _ = server
    assert sampled(ask(url, "x")) != sampled(ask(url, "x"))
    assert sampled(ask(url, "x", temperature=0)) == sampled(ask(url, "x", temperature=0, seed=5))


def test_ids_and_log_probs_are_those_of_the_engine(model: str, server: tuple[str, ModelEngine]) -> None:
    """Compared with RemoteRollout.generate of the same prompt and seed."""
    url, engine = server
    reply = ask(url, "hello", seed=3, temperature=0.7)
    ids = reply["prompt_token_ids"]
    prompts = Batch(
        torch.tensor([len(ids)]),
        tokens={"input_ids": torch.tensor(ids)},
        rows={
            "id": torch.tensor([0]), "seed": torch.tensor([seed_of(3, "serve", 0, 0)]), "greedy": torch.tensor([False]),
            "temperature": torch.tensor([0.7], dtype=torch.float64), "max_tokens": torch.tensor([24]),
        },
    )  # fmt: skip
    answers = engine.rollout.generate(prompts, engine.sampling, 1)
    (choice,) = reply["choices"]
    assert choice["token_ids"] == answers.tokens["input_ids"].tolist()
    assert [item["logprob"] for item in choice["logprobs"]["content"]] == answers.tokens["rollout_log_probs"].tolist()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "seed": 3, "temperature": 0.7, "max_tokens": 24}
    streamed = post(url, CHAT, body | {"stream": True, "return_token_ids": True})[1]
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == choice["token_ids"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == choice["message"]["content"]


def test_a_stop_string_frees_the_engine(server: tuple[str, ModelEngine]) -> None:
    url, engine = server
    text = ask(url, "hello", seed=3, max_tokens=200)["choices"][0]["message"]["content"]
    stop = text[20:22]
    reply = ask(url, "hello", seed=3, max_tokens=200, stop=stop)["choices"][0]
    assert (
        reply["finish_reason"] == "stop"
        and text.startswith(reply["message"]["content"])
        and stop not in reply["message"]["content"]
    )
    assert engine.unfinished == 0


def test_signal_ends_the_server_with_a_reply_to_what_is_in_flight(model: str, tmp_path: Path) -> None:
    env = os.environ | {"TANDEM_API_KEY": TOKEN}
    words = [f"model={model}", f"trainer.default_local_dir={tmp_path}/run", "actor_rollout_ref.rollout.ignore_eos=true"]
    with serve_program(*words, env=env) as server, ThreadPoolExecutor(2) as pool:
        url = address(server)
        assert len(ask(url, "hi", seed=1)["choices"][0]["token_ids"]) == 24
        family = psutil.Process(server.pid).children(recursive=True)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "n": 16}
        whole, streamed = pool.submit(post, url, CHAT, body), pool.submit(post, url, CHAT, body | {"stream": True})
        while post(url, "/health", None, {}, method="GET")[1]["unfinished"] < 32:
            time.sleep(0.02)
        begun = time.monotonic()
        server.send_signal(signal.SIGTERM)
        status, reply = whole.result()
        assert (status, reply["error"]["message"]) == (503, "the server is stopping")
        assert "the server is stopping" in streamed.result()[1].split("\n\n")[-2]
        output, message = server.communicate(timeout=30.0)
        assert time.monotonic() - begun < 15.0
        assert server.returncode == 143 and "Traceback" not in message and TOKEN not in output + message
        assert psutil.wait_procs(family, timeout=5.0)[1] == []


def test_a_token_is_made_and_printed_if_none_is_set(model: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TANDEM_API_KEY"}
    with serve_program(f"model={model}", f"trainer.default_local_dir={tmp_path}/run", env=env) as server:
        url = address(server)
        assert server.stdout is not None
        found = re.fullmatch(r"TANDEM_API_KEY is not set; token of this server: (\S{32})\n", server.stdout.readline())
        assert found
        assert post(url, "/v1/models", None, {}, method="GET")[0] == 401
        assert post(url, "/v1/models", None, JSON | {"Authorization": f"Bearer {found[1]}"}, method="GET")[0] == 200


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model=/nowhere/model"], r".*/nowhere/model.*"),
        (["port={taken}"], r"server\.host=127\.0\.0\.1 server\.port=\d+: .*in use"),
        (["server.token_env=MINE"], r"server\.token_env=MINE: the variable's name must end like that of a secret"),
        (["multi_turn.format=xml"], r"multi_turn\.format=xml: no such format; use hermes.*"),
        (["trainer.n_gpus_per_node=2"], r"trainer\.backend=local.*"),
    ],
)
def test_invalid_configuration_is_a_one_line_error(
    overrides: list[str], line: str, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        typed = [override.format(taken=taken.getsockname()[1]) for override in overrides]
        fixed = ["port=0", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}", f"model={model}"]
        assert main_serve.PROGRAM([*fixed, *typed]) == 2
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 1 and re.match(f"error: {line}", output[0]), output


def test_an_adapter_is_served_on_its_base_model(model: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=2, init_lora_weights=False))
    peft.save_pretrained(tmp_path / "adapter")
    with model_server_module.model_files(serve_config(f"model={tmp_path}/adapter")) as found:
        assert (found.path, found.lora_adapter_path, found.tokenizer_path) == (model, f"{tmp_path}/adapter", None)
    env = os.environ | {"TANDEM_API_KEY": TOKEN}
    words = (f"model={tmp_path}/adapter", f"trainer.default_local_dir={tmp_path}/run")
    with serve_program(*words, env=env) as server:
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "adapter", "messages": messages, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
        status, reply = post(address(server), CHAT, body)
    assert status == 200
    ids = torch.tensor([reply["prompt_token_ids"]])
    merged = peft.merge_and_unload()
    expected = merged.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert reply["choices"][0]["token_ids"] == expected[0, ids.shape[1] :].tolist()

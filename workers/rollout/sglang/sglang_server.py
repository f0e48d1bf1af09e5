"""SGLang's engine in a process of its own: `python -m workers.rollout.sglang.sglang_server PARENT DESCRIPTOR`.

SGLang takes the process over in which it runs: its signals, its event loop, its logging, its limits, its start method, and every
child of it when it ends. None of that is to happen to the trainer. The processes of its ranks are children of this one.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor

from workers.controller.stacks import answer_for_stacks
from workers.controller.stop import die_with_parent
from workers.rollout.sglang.sglang_calls import answer_calls

if __name__ in ("__main__", "__mp_main__") and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from workers.rollout.sglang.sglang_cpu import install_stand_ins

    install_stand_ins()  # in the processes of the ranks too: they load this module first
if __name__ == "__mp_main__":
    die_with_parent(os.getppid())  # SGLang sees to it too, once it has been imported
    answer_for_stacks()

Asked = tuple[str, list[int], dict[str, Any]]
"""Name, prompt, sampling. No name begins as another one does: SGLang aborts what begins with a name."""
Answer = tuple[str, list[int], list[float], str]
"""Name, tokens, log-probs, and why it ended: stop, length or abort."""
ADAPTER = "policy"
FLUSH_ATTEMPTS, FLUSH_PAUSE = 200, 0.02  # the step in which the last answers ended is still being cleared away


class Server:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        from workers.rollout.sglang.sglang_scheduler import run_scheduler

        class TokenEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

            @classmethod
            def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
                """Its process would take 0.4 GB, and make text of tokens for nobody."""
                return [], []

        self.engine = TokenEngine(**arguments)
        self.manager, self.loop = self.engine.tokenizer_manager, self.engine.loop
        self.bracketed = "begin_weight_update" in dir(Engine)  # since 0.5.21 an update has a beginning and an end
        self.children = multiprocessing.active_children()
        self.adapter: str | None = None
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.ended: list[asyncio.Task[Any]] = []
        self.news = asyncio.Event()
        self.loop.run_until_complete(self._take_signals_back())

    async def _take_signals_back(self) -> None:
        self.manager.auto_create_handle_loop()
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self.loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGQUIT, self._tell_of_the_dead)

    def _tell_of_the_dead(self, number: int, frame: FrameType | None) -> None:
        """SGLang sends SIGQUIT when the process of a rank has failed. Some have ended by then, some not yet."""
        ended = [f"process {child.pid} ended with {child.exitcode}" for child in self.children if child.exitcode]
        print(f"SGLang: {'; '.join(ended) or 'the process of a rank failed'}", file=sys.stderr, flush=True)
        leave(self.children, 1)

    # Requests

    def step(self, requests: Sequence[Asked]) -> list[Answer]:
        """Begin with these, then wait until an answer has ended. Those that have."""
        for request in requests:
            self._begin(request)
        return self.loop.run_until_complete(self._ended()) if self.running else []

    def abort(self, names: Sequence[str]) -> list[Answer]:
        """End these. Returns them, and others that have ended meanwhile."""
        return self.loop.run_until_complete(self._abort(names))

    def _begin(self, request: Asked) -> None:
        name, prompt_ids, sampling = request
        work = self.engine.async_generate(
            input_ids=prompt_ids, sampling_params=sampling, return_logprob=True, rid=name, lora_path=self.adapter
        )
        task = self.loop.create_task(work, name=name)
        self.running.add(name)
        task.add_done_callback(self._note)

    def _note(self, task: asyncio.Task[Any]) -> None:
        self.ended.append(task)
        self.news.set()

    async def _ended(self) -> list[Answer]:
        await self.news.wait()
        return self._take_ended()

    def _take_ended(self) -> list[Answer]:
        tasks, self.ended = self.ended, []
        self.news.clear()
        self.running.difference_update(task.get_name() for task in tasks)
        return [self._answer_of(task.get_name(), task.result()) for task in tasks]

    def _answer_of(self, name: str, output: dict[str, Any]) -> Answer:
        said = output["meta_info"]
        pairs, reason = said["output_token_logprobs"], said["finish_reason"]
        if reason["type"] == "abort" and name not in self.aborted:
            raise RuntimeError(f"SGLang gave request {name} up: {reason}")
        self.aborted.discard(name)
        return name, [token for _, token, *_ in pairs], [value for value, *_ in pairs], reason["type"]

    async def _abort(self, names: Sequence[str]) -> list[Answer]:
        await asyncio.sleep(0)  # what was submitted a moment ago is known to SGLang from here on
        for name in self.running.intersection(names):
            self.aborted.add(name)
            self.manager.abort_request(name)
        answers = self._take_ended()
        while not self.running.isdisjoint(names):
            answers += await self._ended()
        return answers

    # Weights and memory

    def begin_update(self) -> None:
        if self.bracketed:
            check(self.engine.begin_weight_update())

    def update(self, payloads: list[bytes]) -> None:
        """payloads: for each rank a list of (name, tensor), as torch pickles tensors for other processes."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, flush_cache=False)
        check(self.loop.run_until_complete(self.manager.update_weights_from_tensor(request, None)))

    def end_update(self) -> None:
        if self.bracketed:
            check(self.engine.end_weight_update())

    def load_adapter(self, config: dict[str, Any], memory: Tensor, named: Sequence[tuple[str, tuple[int, ...], int]]) -> str:
        """In the place of the one before. config: peft's; named: its name for a tensor, its shape, and where it begins in there.
        What SGLang knows it by; the first rank has it now, the others will.

        SGLang takes no second one under a name that it knows, and keeps the first: it says so in its result.
        """
        if self.adapter is not None:
            forgotten, self.adapter = self.adapter, None
            answer = self.engine.unload_lora_adapter(forgotten)
            check((answer.success, answer.error_message))
        tensors = {name: memory[start : start + math.prod(shape)].view(shape) for name, shape, start in named}
        answer = self.engine.load_lora_adapter_from_tensors(ADAPTER, tensors, config)
        check((answer.success, answer.error_message))
        self.adapter = ADAPTER
        return str(self.manager.lora_ref_cache[ADAPTER].lora_id)

    def flush(self) -> None:
        """Forget keys and values of the past. Raises RuntimeError if SGLang does not."""
        for _ in range(FLUSH_ATTEMPTS):
            if self.engine.flush_cache().success:
                return
            time.sleep(FLUSH_PAUSE)
        raise RuntimeError("SGLang did not drop its cache: answers would go on from keys and values of old weights")

    def release(self, tags: list[str]) -> None:
        self.flush()  # SGLang releases nothing while it is busy: its process would end
        self.engine.release_memory_occupation(tags=tags)

    def resume(self, tags: list[str]) -> None:
        self.engine.resume_memory_occupation(tags=tags)

    def facts(self) -> dict[str, Any]:
        """Of the first rank, when it had started."""
        return dict(self.engine._scheduler_init_result.scheduler_infos[0])


def check(answer: tuple[bool, str]) -> None:
    """SGLang says in its result that something failed, and raises nothing."""
    success, message = answer
    if not success:
        raise RuntimeError(f"SGLang: {message}")


def serve(connection: Connection) -> None:
    """Until the worker closes."""
    multiprocessing.current_process().authkey, arguments = connection.recv()
    server = Server(arguments)
    connection.send((True, server.facts()))
    answer_calls(connection, server)
    leave(server.children, 0)


def leave(children: Sequence[BaseProcess], status: int) -> NoReturn:
    """With what this process started, and without what SGLang would do at its end."""
    for child in children:
        child.kill()
    for child in children:
        child.join()
    os._exit(status)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    answer_for_stacks()
    serve(Connection(int(sys.argv[2])))

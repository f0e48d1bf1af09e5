"""SGLang's engine in a process of its own: `python -m workers.rollout.sglang.sglang_server PARENT DESCRIPTOR`.

SGLang takes over the process in which it runs: signal handlers, event loop, logging, resource limits, multiprocessing start
method, and it ends every child of the process when it stops. This must not happen to the trainer. SGLang's rank processes are
children of this one. PARENT: process id of the worker, whose death ends this process. DESCRIPTOR: file descriptor of the socket
over which the worker calls ``Server``.
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

from workers.controller.stacks import enable_stack_reports
from workers.controller.stop import die_with_parent
from workers.rollout.sglang.sglang_calls import answer_calls

if __name__ in ("__main__", "__mp_main__") and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from workers.rollout.sglang.sglang_cpu import install_stubs

    install_stubs()  # in the rank processes too: as spawned processes they load this module first
if __name__ == "__mp_main__":
    die_with_parent(os.getppid())  # SGLang does the same, but only once it has been imported
    enable_stack_reports()

ServedRequest = tuple[str, list[int], dict[str, Any]]
"""Name, prompt, sampling parameters. No name may be a prefix of another: SGLang aborts every request that starts with a name."""
ServedResponse = tuple[str, list[int], list[float], str]
"""Name, tokens, log-probs, and the finish reason: stop, length or abort."""
ADAPTER = "policy"
# A flush fails while SGLang still cleans up after the step in which the last responses ended. Attempts, and seconds in between.
FLUSH_ATTEMPTS, FLUSH_PAUSE = 200, 0.02


class Server:
    """The engine, called by the worker over a pipe (sglang_calls.answer_calls), one method at a time.

    SGLang generates in its own processes, whether or not a call is running. Responses that finish are collected as asyncio tasks
    and returned by the next ``step`` or ``abort``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        from workers.rollout.sglang.sglang_scheduler import run_scheduler

        class TokenEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

            @classmethod
            def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
                """Start none: the process takes 0.4 GB, and the text that it decodes is not used."""
                return [], []

        self.engine = TokenEngine(**arguments)
        self.manager, self.loop = self.engine.tokenizer_manager, self.engine.loop
        self.bracketed = "begin_weight_update" in dir(Engine)  # since 0.5.21 updates are bracketed by begin and end calls
        # Rank processes that SGLang started; they are killed on exit.
        self.children = multiprocessing.active_children()
        self.adapter: str | None = None
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.ended: list[asyncio.Task[Any]] = []
        self.finished = asyncio.Event()
        self.loop.run_until_complete(self._restore_signal_handlers())

    async def _restore_signal_handlers(self) -> None:
        """Replace SGLang's handlers of SIGTERM and SIGQUIT."""
        self.manager.auto_create_handle_loop()  # installs SGLang's handlers now, so that they can be replaced
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self.loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGQUIT, self._report_dead_ranks)

    def _report_dead_ranks(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGQUIT, which SGLang sends when a rank process has failed: report exit codes, and exit.

        Some processes have ended by then, some have not.
        """
        ended = [f"process {child.pid} ended with {child.exitcode}" for child in self.children if child.exitcode]
        print(f"SGLang: {'; '.join(ended) or 'the process of a rank failed'}", file=sys.stderr, flush=True)
        kill_and_exit(self.children, 1)

    # Requests

    def step(self, requests: Sequence[ServedRequest]) -> list[ServedResponse]:
        """Start these requests, then wait until at least one response has finished; returns all that have."""
        for request in requests:
            self._begin(request)
        return self.loop.run_until_complete(self._ended()) if self.running else []

    def abort(self, names: Sequence[str]) -> list[ServedResponse]:
        """Abort these requests; returns their partial responses, and others that finished in the meantime."""
        return self.loop.run_until_complete(self._abort(names))

    def _begin(self, request: ServedRequest) -> None:
        """Start a task that completes with the response."""
        name, prompt_ids, sampling = request
        work = self.engine.async_generate(
            input_ids=prompt_ids, sampling_params=sampling, return_logprob=True, rid=name, lora_path=self.adapter
        )
        task = self.loop.create_task(work, name=name)
        self.running.add(name)
        task.add_done_callback(self._note)

    def _note(self, task: asyncio.Task[Any]) -> None:
        self.ended.append(task)
        self.finished.set()

    async def _ended(self) -> list[ServedResponse]:
        await self.finished.wait()
        return self._take_ended()

    def _take_ended(self) -> list[ServedResponse]:
        """Return and clear the finished responses."""
        tasks, self.ended = self.ended, []
        self.finished.clear()
        self.running.difference_update(task.get_name() for task in tasks)
        return [self._response_of(task.get_name(), task.result()) for task in tasks]

    def _response_of(self, name: str, output: dict[str, Any]) -> ServedResponse:
        """Convert SGLang's output. Raises RuntimeError if SGLang aborted a request that ``abort`` was not called for."""
        info = output["meta_info"]
        pairs, reason = info["output_token_logprobs"], info["finish_reason"]
        if reason["type"] == "abort" and name not in self.aborted:
            raise RuntimeError(f"SGLang gave request {name} up: {reason}")
        self.aborted.discard(name)
        return name, [token for _, token, *_ in pairs], [value for value, *_ in pairs], reason["type"]

    async def _abort(self, names: Sequence[str]) -> list[ServedResponse]:
        await asyncio.sleep(0)  # lets tasks that were just created submit their requests, so that SGLang knows them
        for name in self.running.intersection(names):
            self.aborted.add(name)
            self.manager.abort_request(name)
        responses = self._take_ended()
        # SGLang ends aborted requests asynchronously: wait until none of them runs.
        while not self.running.isdisjoint(names):
            responses += await self._ended()
        return responses

    # Weights and memory

    def begin_update(self) -> None:
        """Begin an update of weights, if this version of SGLang requires it. Raises RuntimeError if SGLang refuses."""
        if self.bracketed:
            check(self.engine.begin_weight_update())

    def update(self, payloads: list[bytes]) -> None:
        """Update weights through SGLang's own call. payloads: for each rank a pickled list of (name, tensor)."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        # flush_cache=False: the worker flushes once at the end, not after each update.
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, flush_cache=False)
        check(self.loop.run_until_complete(self.manager.update_weights_from_tensor(request, None)))

    def end_update(self) -> None:
        """End an update of weights, if this version of SGLang requires it."""
        if self.bracketed:
            check(self.engine.end_weight_update())

    def load_adapter(self, config: dict[str, Any], memory: Tensor, named: Sequence[tuple[str, tuple[int, ...], int]]) -> str:
        """Replace the adapter; returns SGLang's id of it. The first rank has it now, the others follow asynchronously.

        config: peft's. named: peft's name of each tensor, its shape, and its offset in ``memory``. The previous adapter is
        unloaded first: SGLang rejects a second one under a known name, keeps the first, and reports that only in its result.
        """
        if self.adapter is not None:
            previous, self.adapter = self.adapter, None  # requests use none if a call below fails
            answer = self.engine.unload_lora_adapter(previous)
            check((answer.success, answer.error_message))
        tensors = {name: memory[start : start + math.prod(shape)].view(shape) for name, shape, start in named}
        answer = self.engine.load_lora_adapter_from_tensors(ADAPTER, tensors, config)
        check((answer.success, answer.error_message))
        self.adapter = ADAPTER
        return str(self.manager.lora_ref_cache[ADAPTER].lora_id)

    def flush(self) -> None:
        """Drop the KV cache. Raises RuntimeError if SGLang still refuses after FLUSH_ATTEMPTS."""
        for _ in range(FLUSH_ATTEMPTS):
            if self.engine.flush_cache().success:
                return
            time.sleep(FLUSH_PAUSE)
        raise RuntimeError("SGLang did not drop its cache: responses would continue from keys and values of old weights")

    def release(self, tags: list[str]) -> None:
        """Release the memory of ``tags`` (weights, kv_cache)."""
        self.flush()  # also waits until SGLang is idle: a release while it is busy ends its process
        self.engine.release_memory_occupation(tags=tags)

    def resume(self, tags: list[str]) -> None:
        """Reallocate the memory of ``tags``."""
        self.engine.resume_memory_occupation(tags=tags)

    def facts(self) -> dict[str, Any]:
        """Report of the first rank's scheduler after start-up, such as the size of the KV cache."""
        return dict(self.engine._scheduler_init_result.scheduler_infos[0])


def check(answer: tuple[bool, str]) -> None:
    """Raises RuntimeError for a failed call: SGLang reports failure in the result instead of raising."""
    success, message = answer
    if not success:
        raise RuntimeError(f"SGLang: {message}")


def serve(connection: Connection) -> None:
    """Build the engine and serve calls until the worker closes the connection."""
    # Set the key before SGLang starts its ranks: they inherit it, and need it to open tensors that the worker shares.
    multiprocessing.current_process().authkey, arguments = connection.recv()
    server = Server(arguments)
    connection.send((True, server.facts()))
    answer_calls(connection, server)
    kill_and_exit(server.children, 0)


def kill_and_exit(children: Sequence[BaseProcess], status: int) -> NoReturn:
    """Kill all children and exit with ``status``, without running SGLang's exit handlers."""
    for child in children:
        child.kill()
    for child in children:
        child.join()
    os._exit(status)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    enable_stack_reports()
    serve(Connection(int(sys.argv[2])))

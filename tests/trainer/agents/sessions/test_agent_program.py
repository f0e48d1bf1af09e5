"""Programs of the user: what they were served is what is trained, in any order of their calls, and after any restart."""

import asyncio
import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.trainer.agents.sessions.scripted import call, facts, sampled, setup, task
from trainer.agents.isolation import SessionLoop
from trainer.agents.sessions.agent_kit import AgentKit, AgentSetup
from trainer.agents.sessions.agent_program import JournalDiffers, ProgramRunner
from trainer.agents.sessions.agent_session import AgentSession, SessionRefused
from trainer.agents.sessions.pool import AgentPool
from trainer.agents.sessions.protocol import Finished, Journal, SampledTurn, Settled, Wanted

PROGRAM = '''
import asyncio, json, os, random, threading, time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI, APIStatusError

FOLDER = os.path.dirname(__file__)
SERVED = {}
ASKED = {}
ERRORS = {}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}


async def converse(base_url, api_key, task):
    """Random conversations: turns, tools, branches, edits, several calls at the same time, in an order that is never the same."""
    numbers, hurry = random.Random(task.id), random.Random()
    served = SERVED[task.id] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        async def ask(messages, n):
            await asyncio.sleep(hurry.random() / 500)
            reply = await client.chat.completions.create(
                model="policy", messages=messages, n=n, tools=[ADD], logprobs=True, extra_body={"return_token_ids": True}
            )
            for choice in reply.choices:
                served.append((reply.prompt_token_ids, choice.token_ids, [one.logprob for one in choice.logprobs.content]))
            return [choice.message for choice in reply.choices]

        open_ones = [[{"role": "user", "content": f"ab {task.id}"}]]
        for _ in range(numbers.randint(1, 3)):
            # Different ones: which of two equal calls is the first depends on their arrival.
            chosen = numbers.sample(open_ones, min(len(open_ones), numbers.randint(1, 3)))
            found = await asyncio.gather(*(ask(messages, numbers.choice([1, 1, 2])) for messages in chosen))
            for messages, replies in zip(chosen, found):
                for reply in replies:
                    turn = {"role": "assistant", "content": reply.content}
                    if reply.tool_calls:
                        turn["tool_calls"] = [one.model_dump() for one in reply.tool_calls]
                    after = [{"role": "tool", "tool_call_id": one.id, "content": f"{len(open_ones)}"}
                             for one in reply.tool_calls or ()]
                    kind = numbers.choice(["continue", "continue", "edit", "drop"])
                    if kind == "edit" and not reply.tool_calls:
                        turn["content"] = "ba " + (reply.content or "")
                    if kind != "drop":
                        open_ones.append([*messages, turn, *(after or [{"role": "user", "content": f"ab {len(open_ones)}"}])])
    return float(len(served))


async def crowd(base_url, api_key, task):
    """Five calls at the same time, three times, each after some work: of the loop, of a thread, of tasks of its own."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        async def ask(round, one):
            if one == 1:
                time.sleep(0.01)
            elif one == 2:
                await asyncio.to_thread(time.sleep, 0.01)
            elif one == 3:
                for _ in range(20):
                    await asyncio.sleep(0)
            message = {"role": "user", "content": f"{round} {one}"}
            long = "x" * 10 ** (one + 1)
            return await client.chat.completions.create(model="policy", messages=[message], user=long)

        for round in range(3):
            ones = [*range(1, 6)]
            random.shuffle(ones)
            await asyncio.gather(*(ask(round, one) for one in ones))
    return 1.0


def threads(base_url, api_key, task):
    """The same calls by threads."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def ask(name):
        time.sleep(random.random() / 100)
        return client.chat.completions.create(model="policy", messages=[{"role": "user", "content": name}])

    with ThreadPoolExecutor(5) as pool:
        for round in range(3):
            [*pool.map(ask, [f"{round} {one}" for one in range(5)])]
    return 1.0


async def race(base_url, api_key, task):
    """Ends with the first of two calls; one more is given up by its client, and is sampled nevertheless."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        async def ask(text, **options):
            return await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}], **options)

        given_up = asyncio.create_task(ask("a"))
        await asyncio.sleep(0.2)
        given_up.cancel()
        done, _ = await asyncio.wait({asyncio.ensure_future(ask(text)) for text in ("ab", "ba")}, return_when="FIRST_COMPLETED")
        return float(len(done))


async def greedy(base_url, api_key, task):
    """More calls at the same time than it may make; returns how many were answered."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        async def ask(n):
            return await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": str(n)}])

        found = await asyncio.gather(*(ask(n) for n in range(6)), return_exceptions=True)
        ERRORS[task.id] = [one.status_code for one in found if isinstance(one, APIStatusError)]
        return float(sum(not isinstance(one, Exception) for one in found))


def line(base_url, api_key, task):
    """Three calls one after the other; what it asks depends on a table of this module."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [*task.prompt]
    for number in range(ASKED.get(task.id, 3)):
        messages.append({"role": "user", "content": ASKED.get((task.id, number), "ab")})
        try:
            reply = client.chat.completions.create(model="policy", messages=messages, stop="ZZ" if task.id == 77 else None)
        except APIStatusError as error:
            ERRORS[task.id] = error.status_code, error.message
            raise
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})


def moody(base_url, api_key, task):
    """Two calls; the first one is another one when it runs again, and session 1 ends its process in between, once."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    seen = os.path.exists(f"{FOLDER}/{task.id}")
    open(f"{FOLDER}/{task.id}", "w").close()
    for text in ("ab" if task.id < 3 or not seen else "ba", "b"):
        if not client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}]).choices:
            raise ValueError("no choice")
        if task.id == 1 and not seen:
            os._exit(7)
    return 1.0 + seen


def clients(base_url, api_key, task):
    """Two turns with a call and its result, by every client; returns 1 if what it read is what a chat completion has."""
    question, more = {"role": "user", "content": "ab 1"}, {"role": "user", "content": "ab 2"}
    kind = task.extra_info["client"]
    if "anthropic" in kind:
        client = Anthropic(base_url=base_url, api_key=api_key, max_retries=0)
        tools = [{"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}]
        messages = [question]
        for _ in range(2):
            options = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": 500}
            if kind == "anthropic stream":
                with client.messages.stream(**options) as stream:
                    reply = stream.get_final_message()
            else:
                reply = client.messages.create(**options)
            (call,) = [block for block in reply.content if block.type == "tool_use"]
            assert reply.stop_reason == "tool_use" and call.input == {"a": 1}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    elif "responses" in kind:
        client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        tools = [{"type": "function", "strict": True, **ADD["function"]}]
        entries = [question]
        for _ in range(2):
            if kind == "responses stream":
                with client.responses.stream(model="policy", input=entries, tools=tools) as stream:
                    stream.until_done()
                    reply = stream.get_final_response()
            else:
                reply = client.responses.create(model="policy", input=entries, tools=tools)
            (call,) = [item for item in reply.output if item.type == "function_call"]
            assert json.loads(call.arguments) == {"a": 1}
            entries += [*(item.model_dump(exclude_none=True) for item in reply.output)]
            entries.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
    else:
        client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [question]
        for _ in range(2):
            options = {"model": "policy", "messages": messages, "tools": [ADD]}
            if kind == "chat stop":
                options["stop"] = ["<|im_end|>", "ZZ"]
            if kind == "chat stream":
                with client.chat.completions.stream(**options) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**options).choices[0].message
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1}
            same = call.model_dump(include={"id", "type", "function"})
            messages.append({"role": "assistant", "content": message.content, "tool_calls": [same]})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
    return 1.0


def plain(base_url, api_key, task):
    """Two calls without an SDK."""
    messages = [*task.prompt]
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urlopen(Request(f"{base_url}/v1/chat/completions", body, headers)) as reply:
            messages += [json.load(reply)["choices"][0]["message"], {"role": "user", "content": "ab"}]
    return 1.0


def unlike(base_url, api_key, task):
    if task.id == 1:
        raise KeyError("of the program")
    if task.id == 2:
        return float("nan")
    if task.id == 3:
        threading.Event().wait()
    if task.id == 4:
        return 0.5  # without a call
    client = OpenAI(base_url=base_url, api_key="another key" if task.id == 5 else api_key, max_retries=0)
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "ab " * (9000 if task.id == 6 else 1)}])
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    return folder


@pytest.fixture(scope="module")
def given(folder: Path) -> AgentSetup:
    return setup(folder)


def names_of(runner: ProgramRunner) -> dict[str, Any]:
    """The module of the program."""
    program: Any = runner._program
    return dict(program.__globals__)


def model(wanted: Wanted) -> SampledTurn:
    """A turn that depends on the call alone."""
    numbers = Random(f"{wanted.key} {wanted.ordinal}")
    text = numbers.choice(["ab", "ba ab", call("add", a=numbers.randint(0, 9)), "a ZZ b"])
    return sampled(wanted, text)


def run(
    runner: ProgramRunner,
    kit: AgentKit,
    journals: Iterable[Journal],
    *,
    most: int | None = None,
    model: Callable[[Wanted], SampledTurn] = model,
    chance: Random | None = None,
    early: Iterable[SampledTurn] = (),
    settled: list[int] | None = None,
) -> dict[int, Finished | Wanted | Exception]:
    """Run sessions together until each has finished, wants more turns than ``most``, or failed; the journals grow.

    early: turns that arrive before the program has begun. Calls get their turns when the session has settled: all of them, or
    with ``chance`` any of them, in any order. settled: gets the number of calls each time.
    """

    async def one(journal: Journal) -> Finished | Wanted | Exception:
        wanted, loop, calls = asyncio.Queue[Wanted | Settled](), SessionLoop(), list[Wanted]()
        session = AgentSession(copy.deepcopy(journal), kit, loop, wanted.put_nowait)
        running = asyncio.create_task(session.run(runner.run))
        for turn in early:
            session.give(turn)
        try:
            while True:
                asked = asyncio.create_task(wanted.get())
                await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    asked.cancel()
                    error = running.exception()
                    return (
                        running.result() if error is None else error if isinstance(error, Exception) else pytest.fail(str(error))
                    )
                answer = asked.result()
                if isinstance(answer, Wanted):
                    calls.append(answer)
                    continue
                if settled is not None:
                    settled.append(len(calls))
                if chance is not None:
                    chance.shuffle(calls)
                n = len(calls) if chance is None else chance.randint(1, len(calls))
                if most is not None and len(journal.turns) + n > most:
                    n = most - len(journal.turns)
                for call in calls[:n]:
                    journal.turns.append(model(call))
                    session.give(journal.turns[-1])
                calls = calls[n:]
                if n == 0:
                    journal.waits = [(call.key, call.ordinal) for call in calls]
                    return calls[0]
        finally:
            running.cancel()
            await asyncio.wait({running})
            loop.close()

    async def main() -> dict[int, Finished | Wanted | Exception]:
        given = [*journals]
        async with runner.serving():
            found = await asyncio.gather(*map(one, given))
        return {journal.task.id: answer for journal, answer in zip(given, found, strict=True)}

    return asyncio.run(main())


def finished(answer: Any) -> Finished:
    assert isinstance(answer, Finished), answer
    return answer


@pytest.mark.parametrize("n", [60, pytest.param(300, marks=pytest.mark.soak)])
def test_trained_ids_are_those_that_were_served(n: int, folder: Path, given: AgentSetup) -> None:
    """Random sessions with branches, edits, n of 2 and calls at the same time; each sampled token is trained once."""
    runner, kit = ProgramRunner(f"{folder}/program.py:converse"), AgentKit(given)
    found = run(runner, kit, [Journal(task(id)) for id in range(n)])
    n_rows = n_served = 0
    for id, answer in found.items():
        end = finished(answer)
        served = names_of(runner)["SERVED"][id]
        assert "error" not in end.extra and end.reward == len(served), end.extra
        rows = [(part.input_ids.tolist(), part.response_mask, part.rollout_log_probs) for part in end.parts]
        for prompt, ids, log_probs in served:
            whole = [*prompt, *ids]
            containing = [
                (mask[len(prompt) : len(whole)], values[len(prompt) : len(whole)])
                for row, mask, values in rows
                if row[: len(whole)] == whole
            ]
            assert containing, "what was served is the beginning of a row"
            assert any(
                mask.all() and np.array_equal(values, np.array(log_probs, dtype=np.float32)) for mask, values in containing
            ), "trained in one of them, with its log-probs"
        assert sum(int(mask.sum()) for _, mask, _ in rows) == sum(len(ids) for _, ids, _ in served), "and in no other"
        n_rows, n_served = n_rows + len(rows), n_served + len(served)
    assert n_served > 3 * n and n_rows > 1.5 * n


def test_every_client_has_the_same_conversation(folder: Path, given: AgentSetup) -> None:
    """Chat Completions, Responses and Messages, whole and streamed: turns with calls are continued by their tokens.

    Also if the program names the model's own stop token as a stop text, as it may for an engine that has no other.
    """
    kinds = ["chat", "chat stop", "chat stream", "responses", "responses stream", "anthropic", "anthropic stream"]
    runner, kit = ProgramRunner(f"{folder}/program.py:clients"), AgentKit(given)
    journals = [Journal(task(id, extra_info={"client": kind})) for id, kind in enumerate(kinds)]
    found = run(runner, kit, journals, model=lambda wanted: sampled(wanted, f"ba\n{call('add', a=1)}"))
    ids = list[list[int]]()
    for kind, answer in zip(kinds, found.values(), strict=True):
        end = finished(answer)
        assert end.reward == 1.0, (kind, end.extra)
        (part,) = end.parts  # the second call continued the first
        assert int((part.response_mask[1:] > part.response_mask[:-1]).sum()) == 2
        ids.append(part.input_ids.tolist())
    assert all(row == ids[0] for row in ids)


def test_order_of_calls_changes_nothing(folder: Path, given: AgentSetup) -> None:
    runner, kit = ProgramRunner(f"{folder}/program.py:converse"), AgentKit(given)
    expected = [facts(finished(answer)) for answer in run(runner, kit, [Journal(task(id)) for id in range(24)]).values()]
    for seed in range(3):  # calls arrive after random delays, and get their turns in random order, some long after others
        found = run(runner, kit, [Journal(task(id)) for id in range(24)], chance=Random(seed))
        assert [facts(finished(answer)) for answer in found.values()] == expected


def test_a_coroutine_settles_with_all_calls_that_it_can_make(folder: Path, given: AgentSetup) -> None:
    """Whatever it computes before, and however many sessions the process has: nothing here depends on the machine's speed."""
    runner, kit, settled = ProgramRunner(f"{folder}/program.py:crowd"), AgentKit(given), list[int]()
    found = run(runner, kit, [Journal(task(id)) for id in range(12)], settled=settled)
    assert all(finished(answer).reward == 1.0 for answer in found.values())
    assert settled == [5] * 3 * 12


def test_a_function_settles_with_its_first_call_and_its_threads_change_nothing(folder: Path, given: AgentSetup) -> None:
    runner, kit, settled = ProgramRunner(f"{folder}/program.py:threads"), AgentKit(given), list[int]()
    expected = [facts(finished(answer)) for answer in run(runner, kit, [Journal(task(id)) for id in range(4)]).values()]
    found = run(runner, kit, [Journal(task(id)) for id in range(4)], settled=settled, chance=Random(1))
    assert [facts(finished(answer)) for answer in found.values()] == expected
    assert min(settled) == 1 < max(settled)
    assert len({part.input_ids.tobytes() for part in finished(found[0]).parts}) == 15


def test_calls_over_the_limit_are_refused_also_at_the_same_time(folder: Path) -> None:
    runner = ProgramRunner(f"{folder}/program.py:greedy")
    end = finished(run(runner, AgentKit(setup(folder, max_assistant_turns=4)), [Journal(task(0))])[0])
    assert end.reward == 4.0 and end.metrics["turns"] == 4 and names_of(runner)["ERRORS"][0] == [400, 400]


def test_a_program_that_ends_gives_up_its_calls(folder: Path) -> None:
    with AgentPool(setup(folder, program=f"{folder}/program.py:race")) as pool:
        pool.start([task(0)])
        first, *others = pool.collect([0])  # on a machine under load the others are there too
        while len(others) < 2:  # the program has given up its first call, which is in the engines
            others += pool.ready([0], 60.0)
        assert isinstance(first, Wanted) and all(isinstance(one, Wanted) for one in others)
        pool.reply({0: [model(first)]})
        assert pool.collect([0]) == [], "it waits for the others"
        assert isinstance(others[1], Wanted)
        pool.reply({0: [model(others[1])]})
        end = finished(pool.collect([0])[0])
        assert end.reward == 1.0 and end.metrics["turns"] == 2 == len(end.parts), "the call without a client is trained"
        with pytest.raises(KeyError):
            pool.journal(0)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_program_that_runs_again_continues_from_its_journal(turns: int, folder: Path, given: AgentSetup) -> None:
    runner, kit = ProgramRunner(f"{folder}/program.py:converse"), AgentKit(given)
    whole = run(runner, kit, [Journal(task(id)) for id in range(16)])
    journals = [Journal(task(id)) for id in range(16)]
    stopped = run(runner, kit, journals, most=turns)
    again = [journal for journal in journals if isinstance(stopped[journal.task.id], Wanted)]
    assert len(again) >= 4 and {len(journal.turns) for journal in again} == {turns}
    n_before = {journal.task.id: len(journal.turns) for journal in again}
    found = run(runner, kit, again)
    for journal in again:
        id = journal.task.id
        assert facts(finished(found[id])) == facts(finished(whole[id])) and len(journal.turns) > n_before[id]


def test_a_turn_that_ends_while_the_program_starts_again_answers_its_call(folder: Path, given: AgentSetup) -> None:
    """The process was replaced while an engine worked on the call, whose turn is in the journal before the call is made again."""
    runner, kit = ProgramRunner(f"{folder}/program.py:line"), AgentKit(given)
    journal = Journal(task(8))
    waiting = run(runner, kit, [journal], most=1)[8]
    assert isinstance(waiting, Wanted)
    assert journal.waits == [(waiting.key, waiting.ordinal)]
    end = finished(run(runner, kit, [journal], early=[model(waiting)])[8])
    assert facts(end) == facts(finished(run(runner, kit, [Journal(task(8))])[8]))


def test_a_program_whose_calls_differ_from_its_journal_is_found(folder: Path) -> None:
    runner, kit = ProgramRunner(f"{folder}/program.py:line"), AgentKit(setup(folder, tool_timeout=3.0))
    asked = names_of(runner)["ASKED"]
    journals = [Journal(task(id)) for id in (0, 1, 2, 5)]
    run(runner, kit, journals, most=2)
    asked[5] = 2  # it ends before the call that waits
    asked[0, 1] = "ba"  # a call of the journal
    asked[1, 2] = "ba"  # the call that waits
    found = run(runner, kit, journals, most=2)
    assert isinstance(found[0], JournalDiffers) and isinstance(found[1], JournalDiffers)
    assert isinstance(found[2], Wanted) and isinstance(found[5], JournalDiffers)
    asked[4, 0] = "ba"
    other = Journal(task(4), journals[2].turns[:1])
    assert isinstance(run(runner, kit, [other])[4], JournalDiffers), "no call of it is in the journal"


def test_programs_that_fail_end_their_session_with_a_reason(folder: Path) -> None:
    runner, kit = ProgramRunner(f"{folder}/program.py:unlike"), AgentKit(setup(folder, tool_timeout=4.0))
    found = {id: finished(answer) for id, answer in run(runner, kit, [Journal(task(id)) for id in range(1, 8)]).items()}
    reasons = {id: end.extra.get("error") for id, end in found.items()}
    assert "KeyError" in reasons[1] and "not a finite number" in reasons[2]
    assert reasons[3] == "the program made no call for 4 s"
    assert reasons[4] is None and found[4].reward == 0.5 and not found[4].parts[0].response_mask.any()
    assert "401" in reasons[5] and "key" in reasons[5]
    assert "400" in reasons[6] and "maximum model length is 8000" in reasons[6]
    assert reasons[7] is None and found[7].finished and found[7].reward is None


def test_a_stop_text_ends_a_turn_at_its_token(folder: Path, given: AgentSetup) -> None:
    runner, kit = ProgramRunner(f"{folder}/program.py:line"), AgentKit(given)
    journal = Journal(task(77))
    end = finished(run(runner, kit, [journal], model=lambda wanted: sampled(wanted, "a ZZ b"))[77])
    cut = [turn for turn in journal.turns if "ZZ" in kit.seams.text(turn.token_ids.tolist())]
    texts = [message["content"] for message in end.messages if message["role"] == "assistant"]
    assert len(cut) == 3 and texts[-1] == "a "
    trained = sum(int(part.response_mask.sum()) for part in end.parts)
    assert trained < sum(len(turn.token_ids) for turn in journal.turns), "what follows the text is not trained"
    assert end.metrics["breaks/truncated"] >= 1, "a turn without its stop token is not continued by its tokens"


def test_the_length_of_the_engine_is_that_of_the_model(folder: Path, given: AgentSetup) -> None:
    runner = ProgramRunner(f"{folder}/program.py:line")
    ends = []
    for limit in ({}, {"max_length": 30}):
        found = run(runner, AgentKit(given), [Journal(task(5, **limit))], model=lambda wanted: sampled(wanted, "ab"))
        ends.append(max(len(part.input_ids) for part in finished(found[5]).parts))
    assert ends[0] > 30 >= ends[1]
    status, message = names_of(runner)["ERRORS"][5]
    assert status == 400 and "the maximum model length is 30" in message


def test_more_calls_than_turns_are_refused(folder: Path) -> None:
    limited = setup(folder, max_assistant_turns=2)
    runner = ProgramRunner(f"{folder}/program.py:line")
    end = finished(run(runner, AgentKit(limited), [Journal(task(9))])[9])
    assert names_of(runner)["ERRORS"][9][0] == 400 and "has made its 2 calls" in end.extra["error"]
    assert end.metrics["turns"] == 2 and len(end.parts) == 1


def test_refused_breaks_are_an_error_of_the_run(folder: Path) -> None:
    runner = ProgramRunner(f"{folder}/program.py:converse")
    found = run(runner, AgentKit(setup(folder, on_break="refuse")), [Journal(task(id)) for id in range(24)])
    assert any(isinstance(answer, SessionRefused) and "on_break=refuse" in str(answer) for answer in found.values())
    assert json.dumps([str(answer) for answer in found.values() if isinstance(answer, Exception)])


def test_processes_that_die_are_replaced_and_changed_programs_begin_anew(folder: Path) -> None:
    """A program that ends its process, one that was waiting for an engine, and one that makes another call when it runs again."""
    with AgentPool(setup(folder, program=f"{folder}/program.py:moody", tool_timeout=6.0)) as pool:
        pool.start([task(id) for id in (0, 1, 3)])
        wanted = {answer.id: answer for answer in pool.collect([0, 1, 3]) if isinstance(answer, Wanted)}
        assert wanted.keys() == {0, 1, 3} and not any(answer.restarted for answer in wanted.values())
        pool.reply({1: [model(wanted[1])]})  # it ends the process; the others wait for engines
        (second,) = pool.collect([1])
        assert isinstance(second, Wanted) and not second.restarted and pool.deaths == 1
        (three,) = pool.ready([3], 60.0)  # an engine still works on its call of before
        assert isinstance(three, Wanted) and three.restarted and three.key != wanted[3].key
        pool.reply({0: [model(wanted[0])], 1: [model(second)], 3: [model(wanted[3])]})
        zero, one = pool.collect([0, 1], [3])
        assert isinstance(zero, Wanted) and not zero.restarted
        assert isinstance(one, Finished) and one.reward == 2.0 and one.metrics["turns"] == 2
        assert pool.journal(3).turns == [], "the turn that an engine has sampled is of a call that is no longer made"
        pool.reply({0: [model(zero)], 3: [model(three)]})
        zero, three = pool.collect([0, 3])
        assert isinstance(zero, Finished) and zero.metrics["turns"] == 2
        assert isinstance(three, Wanted) and not three.restarted
        pool.reply({3: [model(three)]})
        (three,) = pool.collect([3])
        assert isinstance(three, Finished) and three.metrics["turns"] == 2 and three.reward == 2.0
        assert pool.deaths == 1


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_many_programs_at_once(n: int, folder: Path) -> None:
    with AgentPool(setup(folder, program=f"{folder}/program.py:plain", tool_timeout=120.0)) as pool:
        ids = [*range(n)]
        pool.start([task(id) for id in ids])
        for _ in range(2):
            wanted = [answer for answer in pool.collect(ids) if isinstance(answer, Wanted)]
            assert len(wanted) == n, "all wait for the engines at the same time"
            pool.reply({answer.id: [model(answer)] for answer in wanted})
        ends = [finished(answer) for answer in pool.collect(ids)]
        assert all(end.reward == 1.0 and end.metrics["turns"] == 2 for end in ends) and pool.deaths == 0


def test_a_file_without_the_function_is_an_error_in_one_line(folder: Path) -> None:
    missing = r"agent\.program=.*: program.py has no function nothing; it has"
    with AgentPool(setup(folder, program=f"{folder}/program.py:nothing")) as pool, pytest.raises(ValueError, match=missing):
        pool.wait_ready()

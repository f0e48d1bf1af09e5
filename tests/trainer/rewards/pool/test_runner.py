"""The pool of scoring processes: order, time limits, crashes, and no process left behind."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from configs.schema.ppo import RewardConfig
from tests.trainer.rewards.config import reward_config
from trainer.rewards.pool.runner import Response, RewardRunner, Score
from trainer.rewards.sandbox.forkserver import fork_server

REWARDS = """
import ctypes, os, re, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    word, _, rest = solution_str.partition(" ")
    if word == "raise":
        raise RuntimeError("as asked")
    if word == "nan":
        return float("nan")
    if word == "hang":  # inside C code, where neither signal handlers nor other Python threads run
        re.match(r"(a+)+$", "a" * 64 + "b")
    if word == "interrupt":  # not an Exception: it ends the process through the interpreter's clean-up
        raise KeyboardInterrupt
    if word == "exit":
        os._exit(3)
    if word == "segfault":
        ctypes.string_at(0)
    if word == "sleep":
        time.sleep(float(rest))
    if word == "modules":
        return {"score": 0, "torch": "torch" in sys.modules, "numpy": "numpy" in sys.modules}
    if word == "long":
        raise ValueError("x" * int(rest))
    if word == "large":
        return {"score": extra_info["index"], **{f"{i:0>200}": i for i in range(20000)}}
    if word == "fork":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(1)
    if word in ("spawn", "session"):
        with open(rest, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "600"], start_new_session=word == "session").pid))
        time.sleep(600)
    return {"score": extra_info["index"], "pid": os.getpid(), "finished": extra_info["finished"]}

def all_at_once(data_sources, solution_strs, ground_truths, extra_infos):
    time.sleep(sum(float(text.partition(" ")[2]) for text in solution_strs if text.startswith("sleep")))
    if "exit" in solution_strs:
        os._exit(3)
    of = len(solution_strs)
    return [{"score": info["index"], "pid": os.getpid(), "of": of, "place": i} for i, info in enumerate(extra_infos)]
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def config(path: Path | None = None, *, name: str = "compute_score", num_workers: int = 2, timeout: float = 30.0) -> RewardConfig:
    function = {"path": None if path is None else str(path), "name": name}
    return reward_config(num_workers=num_workers, timeout=timeout, custom_reward_function=function)


def answers(*texts: str) -> list[Response]:
    return [Response("any", text, "", {"index": i}, finished=i % 2 == 0) for i, text in enumerate(texts)]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], limit: float = 10.0) -> None:
    patience = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < patience, "the condition did not become true"
        time.sleep(0.01)


def expect(scores: list[Score], bad: dict[int, str]) -> None:
    """Response i has score i, except those in ``bad``, which failed with that error."""
    for i, score in enumerate(scores):
        if i in bad:
            assert score.value is None and score.error is not None and bad[i] in score.error, (i, score)
        else:
            assert score.value == i and score.error is None, (i, score)


def test_process_without_its_parent_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """As when a run fails on a wrong path while its scoring processes are starting."""
    runner_end, child_end = socket.socketpair()
    command = f"from trainer.rewards.pool.worker import main; main({child_end.fileno()}, {os.getpid()})"
    child = subprocess.Popen([sys.executable, "-c", command], pass_fds=[child_end.fileno()])
    child_end.close()
    runner_end.close()
    assert child.wait(timeout=60) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("n", [0, 1, 7, 500])
def test_scores_come_in_order(rewards: Path, n: int) -> None:
    with RewardRunner(config(rewards)) as runner:
        scores = runner.score(answers(*["fine"] * n))
    assert len(scores) == n
    expect(scores, {})
    assert [score.extra["finished"] for score in scores] == [float(i % 2 == 0) for i in range(n)]


def test_uneven_answers_use_all_processes_and_keep_their_order(rewards: Path) -> None:
    with RewardRunner(config(rewards)) as runner:
        runner.wait_ready()
        scores = runner.score(answers(*(f"sleep {0.02 * (i % 3)}" for i in range(24))))
    expect(scores, {})
    assert len({score.extra["pid"] for score in scores}) == min(2, len(os.sched_getaffinity(0)))


def test_submitted_responses_are_scored_before_the_result_is_asked_for(rewards: Path) -> None:
    with RewardRunner(config(rewards)) as runner:
        runner.wait_ready()
        asked = answers(*["fine"] * 20)
        runner.submit(asked[:9], range(9))

        def scored() -> bool:
            runner.submit([], [])
            return runner.progress.done == 9

        wait_until(scored)
        runner.submit(asked[9:], range(9, 20))
        expect(runner.finish(range(20)), {})
        assert str(runner.progress) == "20 of 20 answers"


def test_pieces_in_any_order_get_the_scores_of_their_places(rewards: Path) -> None:
    texts = ["fine"] * 40
    texts[0], texts[7], texts[22] = "hang", "exit", "raise"
    failures = {0: "timed out after 0.4 s", 7: "ended with exit code 3", 22: "as asked"}
    with RewardRunner(config(rewards, timeout=0.4)) as runner:
        runner.wait_ready()
        for first in (2, 0, 3, 1):
            places = range(first, 40, 4)
            runner.submit([answers(*texts)[place] for place in places], places)
            time.sleep(0.15)
        expect(runner.finish(range(40)), failures)
        expect(runner.score(answers("fine")), {})


def test_function_over_batches_gets_all_pieces_at_once_and_in_order(rewards: Path) -> None:
    with RewardRunner(config(rewards, name="all_at_once")) as runner:
        runner.wait_ready()
        for places in ([4, 5], [0, 3], [2, 1]):
            runner.submit([answers(*["fine"] * 6)[place] for place in places], places)
        scores = runner.finish(range(6))
    expect(scores, {})
    assert {score.extra["of"] for score in scores} == {6.0} and [score.extra["place"] for score in scores] == [*range(6)]


@pytest.mark.parametrize(
    "function", [{}, {"name": "all_at_once"}, {"num_workers": 0}], ids=["one by one", "whole batches", "here"]
)
def test_a_later_batch_waits_while_another_is_finished(rewards: Path, function: dict[str, object]) -> None:
    texts = [*["fine"] * 3, "raise", *["fine"] * 4]
    later = {"all_at_once": {}}.get(str(function.get("name")), {3: "as asked"})
    with RewardRunner(config(rewards, **function)) as runner:
        runner.wait_ready()
        runner.submit(answers(*texts)[:5], range(100, 105))
        runner.submit(answers(*["fine"] * 4), (7, 9, 3, 5))
        scores = runner.finish([7, 9, 3, 5])
        expect(scores, {})
        runner.submit(answers(*texts)[5:], range(105, 108))
        expect(runner.score(answers("fine")), {})
        remaining = runner.finish(range(100, 108))
    expect(remaining, later)
    assert [score.extra.get("of") for score in (scores[0], remaining[0])] == ([4, 8] if "name" in function else [None, None])


def test_failing_response_affects_no_other(rewards: Path) -> None:
    texts = ["fine"] * 40
    failures = {
        3: ("raise", "RuntimeError: as asked (rewards.py:7)"),
        4: ("nan", "not a finite number"),
        17: ("exit", "the scoring process ended with exit code 3"),
        18: ("segfault", "the scoring process was killed by SIGSEGV"),
        39: ("interrupt", "the scoring process was killed by SIGINT"),
    }
    for i, (word, _) in failures.items():
        texts[i] = word
    bad = {i: error for i, (_, error) in failures.items()}
    with RewardRunner(config(rewards)) as runner:
        expect(runner.score(answers(*texts)), bad)
        expect(runner.score(answers("fine", "fine")), {})


def test_late_response_affects_no_other(rewards: Path) -> None:
    texts = ["fine"] * 40
    texts[0] = texts[1] = texts[22] = "hang"
    with RewardRunner(config(rewards, timeout=0.4)) as runner:
        runner.wait_ready()
        start = time.monotonic()
        scores = runner.score(answers(*texts))
        took = time.monotonic() - start
        assert str(runner.progress) == "40 of 40 answers, 3 late"
        first = set(runner.score(answers("fine"))[0].extra)
    expect(scores, dict.fromkeys([0, 1, 22], "timed out after 0.4 s"))
    assert [i for i, score in enumerate(scores) if score.timed_out] == [0, 1, 22]
    assert 0.4 <= took < 5.0 and "pid" in first


def test_limit_applies_to_a_response_not_to_its_chunk(rewards: Path) -> None:
    with RewardRunner(config(rewards, num_workers=1, timeout=0.5)) as runner:
        expect(runner.score(answers(*["sleep 0.2"] * 12)), {})  # chunks of three


@pytest.mark.parametrize("how", ["spawn", "session"])
def test_children_of_a_late_response_are_killed(how: str, rewards: Path, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    with RewardRunner(config(rewards, timeout=0.5)) as runner:
        expect(runner.score(answers(f"{how} {noted}", "fine")), {0: "timed out"})
    wait_until(lambda: not is_alive(int(noted.read_text())))


def test_death_of_a_process_is_seen_although_what_it_forked_lives(rewards: Path) -> None:
    with RewardRunner(config(rewards, timeout=20)) as runner:
        runner.wait_ready()
        start = time.monotonic()
        expect(runner.score(answers("fork", "fine")), {0: "ended with exit code 1"})
        assert time.monotonic() - start < 10


def test_a_large_score_is_not_late_because_the_runner_was_away(rewards: Path) -> None:
    """Only a part of it fits into the socket; the process waits until the runner reads."""
    with RewardRunner(config(rewards, num_workers=1, timeout=1.0)) as runner:
        runner.wait_ready()
        runner.submit(answers("large", "long 3000000"), [0, 1])
        time.sleep(2.0)
        large, long = runner.finish([0, 1])
    assert large.value == 0 and len(large.extra) == 20_000 and not long.timed_out
    assert long.error is not None and long.error.startswith("ValueError: xxx") and len(long.error) < 2100


def test_processes_load_no_torch(rewards: Path) -> None:
    with RewardRunner(config(rewards)) as runner:
        assert runner.score(answers("modules"))[0].extra == {"torch": 0.0, "numpy": 0.0}


def test_start_does_not_wait_and_close_leaves_nothing(rewards: Path) -> None:
    slow = rewards.with_name("slow.py")
    slow.write_text("import time\ntime.sleep(1)\n" + REWARDS)
    runner = RewardRunner(config(slow))
    start = time.monotonic()
    runner.start()
    assert time.monotonic() - start < 0.5
    pids = {int(score.extra["pid"]) for score in runner.score(answers(*["sleep 0.05"] * 8))}
    assert all(is_alive(pid) for pid in pids)
    runner.close()
    assert not any(is_alive(pid) for pid in pids)
    expect(runner.score(answers("fine")), {})  # the runner restarts
    runner.close()


def test_process_killed_between_calls_is_replaced(rewards: Path) -> None:
    with RewardRunner(config(rewards)) as runner:
        pids = {int(score.extra["pid"]) for score in runner.score(answers(*["sleep 0.05"] * 8))}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
        expect(runner.score(answers(*["fine"] * 8)), {})


def test_interrupted_call_does_not_affect_the_next(rewards: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with RewardRunner(config(rewards)) as runner:
            runner.wait_ready()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                runner.score(answers(*["sleep 0.1"] * 40))
            expect(runner.score(answers("sleep 0.1", "fine", "fine")), {})
    finally:
        signal.signal(signal.SIGALRM, before)


def test_processes_die_with_a_killed_parent(rewards: Path, tmp_path: Path) -> None:
    script = f"""
import os, signal
from tests.trainer.rewards.config import reward_config
from trainer.rewards.pool.runner import Response, RewardRunner
function = {{"path": {str(rewards)!r}, "name": "compute_score"}}
runner = RewardRunner(reward_config(num_workers=2, timeout=60.0, custom_reward_function=function))
scores = runner.score([Response("any", "sleep 0.1", "", {{"index": i}}, True) for i in range(8)])
print(*{{int(score.extra["pid"]) for score in scores}}, flush=True)
signal.setitimer(signal.ITIMER_REAL, 0.3)  # kills this process in the midst of scoring
runner.score([Response("any", "hang", "", {{"index": i}}, True) for i in range(8)])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == -signal.SIGALRM, run.stderr
    pids = [int(pid) for pid in run.stdout.split()]
    assert pids
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_no_more_processes_than_cores(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with RewardRunner(config(rewards, num_workers=8)) as runner:
        scores = runner.score(answers(*["sleep 0.01"] * 16))
    assert len({score.extra["pid"] for score in scores}) == 1


def test_no_process_is_started_without_rules() -> None:
    before = psutil.Process().children()
    with RewardRunner(reward_config(scorer="none")) as runner:
        runner.wait_ready()
        assert psutil.Process().children() == before
        assert runner.score([Response("any", "text", None, {}, True)] * 2) == [Score(0.0, {}, None)] * 2


def test_controller_scores_without_workers(rewards: Path) -> None:
    with RewardRunner(config(rewards, num_workers=0)) as runner:
        scores = runner.score(answers("fine", "raise", "fine"))
    expect(scores, {1: "RuntimeError: as asked"})
    assert scores[0].extra["pid"] == os.getpid()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("n", [0, 1, 500])
def test_batch_function_gets_complete_batches(rewards: Path, num_workers: int, n: int) -> None:
    with RewardRunner(config(rewards, name="all_at_once", num_workers=num_workers)) as runner:
        scores = runner.score(answers(*["fine"] * n))
        again = runner.score(answers("fine", "fine"))
    expect(scores, {})
    expect(again, {})
    assert len(scores) == n and all(score.extra["of"] == n for score in scores)
    assert len({score.extra["pid"] for score in (*scores, *again)}) == 1


def test_one_process_is_used_for_batch_functions(rewards: Path) -> None:
    before = len(psutil.Process().children())
    with RewardRunner(config(rewards, name="all_at_once")) as runner:
        runner.start()
        for process in runner._processes:  # until both have reported ready: one turn may receive both messages
            assert select.select([process.connection], [], [], 60.0)[0]
        runner.wait_ready()
        runner.wait_ready()
        assert len(psutil.Process().children()) == before + 1


def test_batch_has_the_limit_of_its_responses_and_fails_as_a_unit(rewards: Path) -> None:
    with RewardRunner(config(rewards, name="all_at_once", timeout=0.3)) as runner:
        runner.wait_ready()
        expect(runner.score(answers("sleep 0.5", "fine", "fine")), {})
        expect(runner.score(answers("sleep 5", "fine")), dict.fromkeys(range(2), "timed out after 0.6 s"))
        expect(
            runner.score(answers("fine", "exit", "fine")), dict.fromkeys(range(3), "the scoring process ended with exit code 3")
        )
        expect(runner.score(answers("fine", "fine")), {})


def test_file_that_kills_its_process_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("import os\nos._exit(7)\n")
    with RewardRunner(config(path)) as runner, pytest.raises(RuntimeError, match="did not start: it ended with exit code 7"):
        runner.score(answers("fine"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_built_in_scorers_and_an_unknown_source(num_workers: int) -> None:
    with RewardRunner(config(num_workers=num_workers)) as runner:
        known = [
            Response("openai/gsm8k", "#### 72", "72", {}, finished=False),
            Response("sort_digits", "0123", "0123", {}, finished=True),
            Response("sort_digits", "0123", "0123", {}, finished=False),
            Response("openai/gsm8k", "#### 72", "many", {}, finished=True),
        ]
        scores = runner.score(known)
        assert [score.value for score in scores] == [1.0, 1.0, 0.0, None] and "many" in (scores[3].error or "")
        with pytest.raises(ValueError, match="'chess' has no scorer"):
            runner.score([*known, Response("chess", "e4", "e4", {}, finished=True)])


@pytest.mark.alone
def test_warm_pool_is_fast() -> None:
    """4,096 GSM8K answers take 0.05 s on two idle cores, 256 short ones 3 ms. The bounds leave room for a busy machine."""
    solution = "She sold 48 / 2 = <<48/2=24>>24 clips in May, and 48 + 24 altogether.\n" * 4
    many = [Response("openai/gsm8k", f"{solution}#### {i:,}", str(i), {"answer": solution}, finished=True) for i in range(4096)]
    few = [Response("sort_digits", "012345", "012345", {"index": i}, finished=True) for i in range(256)]
    with RewardRunner(config()) as runner:
        runner.wait_ready()
        start = time.monotonic()
        assert sum(score.value or 0.0 for score in runner.score(many)) == 4096
        assert time.monotonic() - start < 3.0
        times = []
        for _ in range(5):
            start = time.monotonic()
            assert sum(score.value or 0.0 for score in runner.score(few)) == 256
            times.append(time.monotonic() - start)
        assert min(times) < 0.05


ADVERSARIAL = {
    "openai/gsm8k": [
        "#### 9**9**9**9",
        "{" * 2_000_000,
        "#### " + "1,111" * 50_000,
        "#### \0",
        "#### " + "9" * 100_000,
        "(a+)+$" * 100_000,
    ],
    "lighteval/MATH": [
        "\\boxed{9^{9^9}}",
        "\\boxed{" * 200_000,
        "\\boxed{x^{999}-y^{998}+(x+y)^{997}}",
        "\\boxed{" + "9" * 100_000 + "}",
        "\\boxed{" + "\\frac{" * 19 + "1" + "}{2}" * 19 + "}",
        "\\boxed{x\0}",
    ],
    "math_dapo": [
        "Answer:" * 200_000,
        "Answer: " + "$" * 1_000_000,
        "Answer: " + "\\boxed{" * 40,
        "Answer: " + "9" * 100_000,
        "\0",
        "\ud800",
    ],
    "apps": [
        "while True: pass",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import os\nwhile True: os.fork()",
        "x = []\nwhile True: x.append(bytearray(1 << 24))",
        "import ctypes\nctypes.string_at(0)",
        "while True: print('x' * 1000)",
    ],
}


def test_adversarial_responses_kill_no_process() -> None:
    """They are wrong, not failed; the answers between them keep their scores; no process of the pool dies."""
    truths = {"openai/gsm8k": "7", "lighteval/MATH": "x+7", "math_dapo": "7", "apps": {"inputs": ["7"], "outputs": ["7"]}}
    right = {"openai/gsm8k": "#### 7", "lighteval/MATH": "\\boxed{7+x}", "math_dapo": "Answer: 7", "apps": "print(input())"}
    hostile = [(source, text) for source, texts in ADVERSARIAL.items() for text in texts]
    mixed = [pair for source, text in hostile for pair in ((source, text), (source, right[source]))]
    with RewardRunner(reward_config(num_workers=2, timeout=30.0, code={"time_limit": 0.5, "memory_limit_mb": 256})) as runner:
        runner.wait_ready()
        before = [process._popen.pid for process in runner._processes]
        scores = runner.score([Response(source, text, truths[source], {}, finished=True) for source, text in mixed])
        assert [process._popen.pid for process in runner._processes] == before
    assert [score.error for score in scores] == [None] * len(mixed)
    assert all(score.value in (0.0, -1.0) for score in scores[::2]) and all(score.value == 1.0 for score in scores[1::2])


def test_scorer_out_of_memory_fails_only_that_response(rewards: Path) -> None:
    rewards.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(bytearray(int(solution_str)))"
    )
    changed = replace(config(rewards), memory_limit_mb=256)
    with RewardRunner(changed) as runner:
        scores = runner.score([Response("any", str(size), "", {}, finished=True) for size in (1, 1 << 30, 2)])
    assert [score.value for score in scores] == [1.0, None, 2.0] and "MemoryError" in (scores[1].error or "")


def test_further_arguments_of_the_users_function(rewards: Path) -> None:
    rewards.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, *, scale):\n    return scale * len(solution_str)"
    )
    function = {"path": str(rewards), "reward_kwargs": {"scale": 0.5}}
    with RewardRunner(reward_config(num_workers=1, custom_reward_function=function)) as runner:
        assert runner.score(answers("four"))[0].value == 2.0


def test_close_without_workers_ends_the_servers_of_the_scorers() -> None:
    with RewardRunner(reward_config(num_workers=0)) as runner:
        assert runner.score([Response("lighteval/MATH", "\\boxed{x+1}", "1+x", {}, finished=True)])[0].value == 1.0
        pid = fork_server("trainer.rewards.rules.math").pid
        assert is_alive(pid)
    assert not is_alive(pid)

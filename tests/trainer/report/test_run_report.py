import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trainer.cluster.watchdog import CallSpan
from trainer.report.run_report import (
    MOST_ANSWERS,
    MOST_TOOLS,
    MOST_WORKERS,
    GrowingReport,
    answers_of,
    finish,
    main,
    phase_seconds,
    timeline_of,
    tool_curves,
    workers_of,
    write_report,
)
from trainer.run.events import Events
from trainer.run.logger import Sample
from trainer.run.run_dir import GLOBAL_STEP, json_line, read_lines, read_metrics
from trainer.run.timing import Span
from trainer.tracking.conversation import conversation_of
from trainer.tracking.tracker import Tracker

CONFIG: dict[str, Any] = {
    "trainer": {"project_name": "project", "experiment_name": "sort <b>digits</b>", "seed": 7},
    "data": {"note": "</pre><script>"},
}
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


def sample(uid: int, response: str, score: float) -> Sample:
    return Sample(
        uid=uid, data_source="sort", prompt=f"{uid}=", response=response, ground_truth="12", score=score, reward_error=None
    )


def make_run(run_dir: Path, steps: int = 40) -> Path:
    """Synthetic numbers, written as a run writes them."""
    tracker = Tracker([], run_dir, "project", "experiment", CONFIG)
    tracker.log({"val/accuracy": 0.25, "val/problems": 4, "val-core/a/reward/mean@1": 0.1, "val-core/<i>/reward/mean@1": 0.4}, 0)
    tracker.log_samples([sample(1, HOSTILE, 0.0), sample(2, "21", 0.0), sample(3, "only before", 0.0)], 0)
    for step in range(1, steps + 1):
        metrics = {
            "critic/score/mean": step / steps, "actor/entropy": 1 / step, "actor/grad_norm": float("nan") if step == 3 else 0.5,
            "response_length/mean": 5, "response_length/min": 1, "response_length/max": 9, "perf/total_num_tokens": 1000,
            "timing_s/gen": 1.0, "timing_s/update_actor": 2.0, "timing_s/step": 3.5, "perf/throughput": 300.0, "perf/mfu": 0.125,
            "actor/pg_clipfrac": 0.0,
            "actor/kl_loss": 1e-4, "training/rollout_probs_diff_mean": 1e-7, "actor/lr": 1e-6, "reward/failed": 0,
        }  # fmt: skip
        if step == steps:
            metrics |= {"val/accuracy": 0.75, "val/problems": 4, "timing_s/testing": 0.5}
            tracker.log_samples([sample(1, "12", 1.0), sample(2, "12", 1.0)], step)
        tracker.log(metrics, step)
    tracker.close()
    return run_dir


class Page(HTMLParser):
    """Tags and attributes, as a browser parses them, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("style", "script"):
            self.pieces.append(data)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(make_run(tmp_path_factory.mktemp("run"))).read_text(encoding="utf-8")


@pytest.mark.parametrize(("partial", "name"), [(None, "accuracy"), (0.0, "accuracy"), (0.25, "score")])
def test_mean_of_partial_credits_is_called_a_score(
    partial: float | None, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker([], tmp_path, "project", "experiment", CONFIG)
    for step, value in ((0, 0.25), (1, 0.5)):
        metrics = {"val/accuracy": value, "val/problems": 4.0, "timing_s/step": 1.0}
        tracker.log(metrics | ({} if partial is None else {"val/partial_credit": partial * step}), step)
    tracker.close()
    finish(tmp_path)
    assert f"held-out {name}: 0.25 -> 0.50 (4 problems)\n" in capsys.readouterr().out
    assert f"held-out {name} ·" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It neither makes a failure of a run that succeeded nor hides the error of one that failed."""
    (make_run(tmp_path) / "samples.jsonl").write_text("torn{\n")
    finish(tmp_path)
    line = f"note: {tmp_path}/report.html is not written: {tmp_path}/samples.jsonl, line 1 is not JSON: "
    assert capsys.readouterr().err.startswith(line)


def test_headline_states_the_results(html: str) -> None:
    text = Page(html).text
    for message in (
        "4 problems 0.250 → 0.750 +0.500",
        "steps 40",
        "tokens 40k",
        "time 2 min 20 s",
        "tokens/s/GPU 300",
        "MFU 12.5%",
    ):
        assert message in text, message


def test_text_of_a_run_is_escaped(html: str) -> None:
    page = Page(html)
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    charts = sum(1 for tag, attributes in page.tags if attributes.get("class") == "card chart")
    assert scripts.count({}) == 1 and len(scripts) == charts + 1  # the page's own, and one piece of JSON per chart
    assert not [tag for tag, attributes in page.tags if tag in ("img", "iframe") or "onerror" in attributes]
    assert HOSTILE in page.text and "sort <b>digits</b>" in page.text and "</pre><script>" in page.text
    assert "<script>alert" not in html and "<b>digits" not in html and "val-core/<i>" not in html


def test_page_fetches_nothing(html: str) -> None:
    page = Page(html)
    assert not [tag for tag, attributes in page.tags if tag == "link" or {"src", "href", "srcset", "data"} & attributes.keys()]
    assert "url(" not in html and "@import" not in html and "fetch(" not in html and "http" not in html


def test_every_chart_is_well_formed_and_has_its_data(html: str) -> None:
    titles = []
    for chart in re.findall(r'<div class="card chart">.*?</script>', html, re.DOTALL):
        svg = ElementTree.fromstring(re.search(r"<svg.*?</svg>", chart, re.DOTALL)[0])  # type: ignore[index]
        titles.append(svg.attrib["aria-label"])
        lines = json.loads(re.search(r"json\">(.*)</script>", chart)[1])  # type: ignore[index]
        assert len(svg.findall("path[@class='curve']")) == len(lines) >= 1
        if titles[-1] == "Score":
            assert [point[2] for point in lines[0]] == list(range(1, 41))
        if titles[-1] == "Gradient norm":
            assert 3 not in [point[2] for point in lines[0]]  # NaN: excluded
        if titles[-1] == "Held-out accuracy":
            assert len(lines) == 3  # all, and each data set
        if titles[-1] == "Answer length":
            assert len(svg.findall("path[@class='band']")) == 1
    assert set(titles) >= {
        "Held-out accuracy", "Score", "Answer length", "Entropy", "KL", "Gradient norm", "Learning rate", "Trainer vs rollout",
    }  # fmt: skip
    assert not {"Loss", "Value loss", "Explained variance", "Clipped"} & set(titles)  # missing, or always 0


def test_single_data_source_has_no_separate_curve(tmp_path: Path) -> None:
    tracker = Tracker([], tmp_path, "p", "e", CONFIG)
    tracker.log({"val/accuracy": 0.5, "val-core/a/reward/mean@1": 0.5}, 1)
    tracker.close()
    (chart,) = re.findall(r"json\">(.*)</script>", write_report(tmp_path).read_text(encoding="utf-8"))
    assert len(json.loads(chart)) == 1


def test_score_that_is_always_zero_is_shown(tmp_path: Path) -> None:
    tracker = Tracker([], tmp_path, "p", "e", CONFIG)
    tracker.log({"critic/score/mean": 0.0, "actor/entropy": 0.0}, 1)
    tracker.close()
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert 'aria-label="Score"' in html and 'aria-label="Entropy"' not in html


def test_time_is_split_into_phases_and_other(html: str) -> None:
    text = Page(html).text
    for row in ("gen 40.0 s 28.5 %", "update_actor 1 min 20 s 56.9 %", "testing 0.5 s 0.4 %", "other 20.0 s 14.2 %"):
        assert row in text, row


def test_timeline_has_a_lane_per_pool_and_the_last_steps(tmp_path: Path) -> None:
    tracker = Tracker([], tmp_path, "project", "experiment", CONFIG)
    for step in range(1, 6):
        spans = [Span("values", ("<b>",), step + 0.2, step + 0.8), Span("adv", (), step + 0.8, step + 0.9)]
        tracker.log_spans([Span("gen", ("workers",), step, step + 0.25), *spans, Span("step", (), step, step + 0.9)], [], step)
    tracker.close()
    drawn = timeline_of(read_lines(tmp_path / "timeline.jsonl"), {"gen": 7})
    assert drawn is not None
    assert [name.label for name in drawn.names] == ["<b>", "workers", "controller"] and drawn.labels == ["values", "gen", "adv"]
    assert drawn.colors == [8, 7, 9]
    assert len(drawn.bars) == 3 * 3 and drawn.bars[0].tooltip == "values: 0.200 to 0.800 s"
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "the last 3 steps" in text and text.count("<title>values: ") == 3 and "&lt;b&gt;</text>" in text
    assert timeline_of([*read_lines(tmp_path / "timeline.jsonl"), {GLOBAL_STEP: 6, "spans": []}], {"gen": 7}) == drawn
    assert timeline_of([], {}) is None


def test_each_worker_of_the_last_step_has_a_lane(tmp_path: Path) -> None:
    tracker = Tracker([], tmp_path, "project", "experiment", CONFIG)
    before = CallSpan("weight sync", "a", 0.5, (0.9, 0.9))
    for step in (1, 2):
        spans = [Span("gen", ("a",), step, step + 0.5), Span("adv", (), step + 0.5, step + 0.6), Span("step", (), step, step + 1)]
        calls = [CallSpan("update", "b", step + 0.6, (step + 0.9,)), CallSpan("generation", "a", step, (step + 0.5, step + 0.25))]
        tracker.log_spans(spans, [before, *calls], step)
    tracker.close()
    found = workers_of(read_lines(tmp_path / "timeline.jsonl"), {"adv": 1, "gen": 3})
    assert found is not None
    step, drawn = found
    assert step == 2 and [name.label for name in drawn.names] == ["a 0", "a 1", "b 0", "controller"]
    assert [bar.tooltip for bar in drawn.bars] == [
        "generation: 0.000 to 0.500 s", "generation: 0.000 to 0.250 s", "update: 0.600 to 0.900 s", "adv: 0.500 to 0.600 s",
    ]  # fmt: skip
    assert dict(zip(drawn.labels, drawn.colors, strict=True)) == {"generation": 3, "update": 4, "adv": 1}, (
        "the color of a phase is the same in all charts"
    )
    assert "Step 2, by worker" in Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    many = {GLOBAL_STEP: 3, "calls": [["update", "a", 0.0, [1.0] * (MOST_WORKERS + 1)]], "spans": []}
    found = workers_of([many], {})
    assert found is not None and len(found[1].names) == MOST_WORKERS
    assert workers_of([], {}) is None
    assert workers_of([{GLOBAL_STEP: 1, "spans": []}], {}) is None, "also for runs of versions without calls"


def growing(run_dir: Path, steps: int) -> Tracker:
    tracker = Tracker([], run_dir, "p", "e", CONFIG, more=[GrowingReport(run_dir)])
    for step in range(1, steps + 1):
        tracker.log({"critic/score/mean": step / 8}, step)
    return tracker


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.read_text(encoding="utf-8")


def test_report_is_updated_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.report.run_report.SECONDS", 0.01)
    monkeypatch.setattr("trainer.report.run_report.SHARE", 1e6)
    tracker = growing(tmp_path, 1)
    assert "steps 1 " in Page(wait_for(tmp_path / "report.html")).text
    tracker.log({"critic/score/mean": 1.0}, 2)
    deadline = time.monotonic() + 20
    while "steps 2 " not in (text := Page(wait_for(tmp_path / "report.html")).text) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "steps 2 " in text
    tracker.close()
    assert not (tmp_path / "report.html.partial").exists()


def test_report_takes_at_most_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr("trainer.report.run_report.SECONDS", 0.0)
    monkeypatch.setattr("trainer.report.run_report.write_report", lambda run_dir: busy(0.05))
    monkeypatch.setattr("threading.Event.wait", rested(rests))
    tracker = growing(tmp_path, 1)
    deadline = time.monotonic() + 10
    while not rests and time.monotonic() < deadline:
        time.sleep(0.01)
    tracker.close()
    assert 5.0 <= rests[0] < 10.0


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rested(rests: list[float]) -> Callable[[threading.Event, float | None], bool]:
    wait = threading.Event.wait

    def waited(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "report" and timeout is not None:
            rests.append(timeout)
        return wait(event, timeout)

    return waited


def test_failed_write_is_reported_once_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run_dir: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("trainer.report.run_report.write_report", fails)
    tracker = growing(tmp_path, 3)
    deadline = time.monotonic() + 10
    while not (message := capsys.readouterr().err) and time.monotonic() < deadline:
        time.sleep(0.01)
    tracker.close()
    assert message.splitlines()[0].endswith("is not written during the run: OSError: no space left")


def test_page_of_a_thousand_steps_has_a_few_megabytes(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1000)
    row = {
        "uid": 1, "prompt": "p" * 400, "ground_truth": "1", "score": 0.5, "length": 2000, "tokens": [" word"] * 512,
        "rollout": [-1.2345] * 512, "trainer": [-1.2346] * 512, "advantages": [0.7071] * 512,
    }  # fmt: skip
    entries = [json_line({GLOBAL_STEP: step, **row}) for step in range(10, 1010, 10) for _ in range(8)]
    (tmp_path / "answers.jsonl").write_text("".join(entries))
    before = time.thread_time()
    page = write_report(tmp_path)
    assert page.stat().st_size < 3e6 and time.thread_time() - before < 5.0


def test_other_time_is_the_step_minus_its_phases() -> None:
    timed = {GLOBAL_STEP: 1, "timing_s/gen": 2.0, "timing_s/engine_sleep": 0.5, "timing_s/testing": 9.0, "timing_s/step": 5.0}
    phases, steps, parts = phase_seconds([{GLOBAL_STEP: 0, "val/accuracy": 1.0}, timed])
    assert (phases, steps, parts) == (["gen", "testing", "other"], [1], [[2.0, 9.0, 3.0]])


def test_first_and_last_responses_are_paired(html: str, tmp_path: Path) -> None:
    first, last, pairs = answers_of(read_lines(make_run(tmp_path) / "samples.jsonl"))
    assert (first, last) == (0, 40)
    assert [(pair.first["uid"], pair.last and pair.last["response"]) for pair in pairs] == [(1, "12"), (2, "12")]
    many = [{**sample(uid, "x", 0.0), GLOBAL_STEP: 0} for uid in range(MOST_ANSWERS + 1)]
    assert len(answers_of(many)[2]) == MOST_ANSWERS
    text = Page(html).text
    assert "before · step 0 after · step 40" in text and "only before" not in text
    assert html.count('<span class="score up">1</span>') == 2


def test_run_without_steps_has_a_report(tmp_path: Path) -> None:
    Tracker([], tmp_path, "p", "e", CONFIG).close()
    assert "No step is done yet" in write_report(tmp_path).read_text(encoding="utf-8")


def test_supervised_run_shows_its_losses(tmp_path: Path) -> None:
    tracker = Tracker([], tmp_path, "p", "e", CONFIG)
    tracker.log({"train/loss": 2.0, "train/lr": 1e-3, "timing_s/step": 1.0}, 1)
    tracker.log({"train/loss": 1.0, "train/lr": 1e-3, "timing_s/step": 1.0, "val/loss": 1.5}, 2)
    tracker.close()
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "training 1 held-out 1.5" in text and "step 2.0 s 100.0 %" in text


def test_failed_rewards_are_shown(tmp_path: Path) -> None:
    tracker = Tracker([], tmp_path, "p", "e", CONFIG)
    tracker.log({"reward/failed": 3}, 1)
    tracker.log({"reward/failed": 4}, 2)
    tracker.close()
    assert "7 rewards failed" in write_report(tmp_path).read_text(encoding="utf-8")


def test_command_writes_the_report(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=2)
    command = [sys.executable, "-m", "trainer.report", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"report: {tmp_path}/run/report.html\n" and done.stderr == ""
    with pytest.raises(SystemExit, match="usage: "):
        main([str(tmp_path)])


def conversation() -> list[dict[str, Any]]:
    """Hostile text everywhere, and of 100,000 characters."""
    function = {"name": HOSTILE, "arguments": json.dumps({"a": HOSTILE})}
    return conversation_of(
        [
            {"role": "system", "content": HOSTILE},
            {
                "role": "assistant", "content": "</script>", "sampled": True, "reward": -0.5, "truncated": True,
                "reasoning_content": HOSTILE, "tool_calls": [{"id": "a", "function": function}],
            },
            {"role": "tool", "tool_call_id": "a", "content": HOSTILE * 3000 + "\x1b\x00", "status": "timeout"},
            {"role": HOSTILE, "content": HOSTILE, "sampled": True},
        ]
    )  # fmt: skip


def sessions(run_dir: Path, steps: int = 1) -> Path:
    """A run whose samples and answers are conversations."""
    tracker = Tracker([], run_dir, "project", "experiment", CONFIG)
    for step in range(1, steps + 1):
        both: list[Sample] = [{**sample(uid, HOSTILE, 0.5), "conversation": conversation()} for uid in (1, 2)]
        tracker.log_samples(both, step)
        metrics = {"agents/turns": 2.0, "agents/turns/max": 3.0, "agents/tokens/sampled": 20.0, "agents/tokens/observed": 9.0}
        metrics |= {"agents/tool/<b>add/calls": 0.5, "agents/tool/<b>add/errors": 0.25, "agents/tool/x/y/calls": 0.125}
        tracker.log(metrics | {"timing_s/gen": 1.0, "timing_s/agents/tool/x/y/seconds": 7.0, "timing_s/step": 2.0}, step)
    tracker.close()
    row = {
        "uid": 1, "prompt": "p", "ground_truth": "1", "score": 0.5, "length": 3, "tokens": ["a", HOSTILE, "b"],
        "rollout": [-1.0, 0.0, -1.0], "trainer": [-1.0, 0.0, -1.0], "advantages": [1.0, 0.0, 1.0],
        "observed": [[1, 2]], "conversation": conversation(),
    }  # fmt: skip
    (run_dir / "answers.jsonl").write_text(
        "".join(json_line({GLOBAL_STEP: step, **row}) for step in range(1, steps + 1) for _ in range(8))
    )
    return run_dir


def test_conversation_is_shown_as_turns(tmp_path: Path) -> None:
    page = Page(write_report(sessions(tmp_path)).read_text(encoding="utf-8"))
    kinds = [attributes["class"] for _, attributes in page.tags if (attributes.get("class") or "").startswith("turn")]
    # Two samples with prompt and answer, eight answers; what the model did not sample is shaded.
    assert kinds.count("turns") == 2 * 2 + 8 and kinds.count("turn sampled") == 2 * 10 and kinds.count("turn") == 2 * 10
    assert "shaded: not sampled by the model, not trained" in page.text and "conversation, 4 messages" in page.text
    assert "assistant truncated reward -0.5" in page.text and f"tool {HOSTILE} timeout" in page.text
    assert f"{HOSTILE} (a={json.dumps(HOSTILE)})" in page.text and f"{HOSTILE} </script>" in page.text
    assert "characters are left out here … " in page.text and "\\x1b\\x00" in page.text


def test_text_of_a_conversation_is_escaped_and_cut(tmp_path: Path) -> None:
    html = write_report(sessions(tmp_path / "a")).read_text(encoding="utf-8")
    page = Page(html)
    assert not [tag for tag, attributes in page.tags if tag in ("img", "iframe") or "onerror" in attributes]
    assert "<script>alert" not in html and "<b>add" not in html and "\x1b" not in html and "\x00" not in html
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    charts = sum(1 for tag, attributes in page.tags if attributes.get("class") == "card chart")
    assert len(scripts) == charts + 3, "one for each chart, the page, the tokens and their program"
    many = write_report(sessions(tmp_path / "b", steps=200))
    assert many.stat().st_size < 1e6


def test_metrics_of_sessions_have_charts(tmp_path: Path) -> None:
    html = write_report(sessions(tmp_path)).read_text(encoding="utf-8")
    charts = dict(re.findall(r'<h3>([^<]*)</h3><span title="([^"]*)">', html))
    assert charts.keys() >= {"Turns", "Tokens of sessions", "Tool calls", "Tool errors"}
    text = Page(html).text
    assert "<b>add 0.5 x/y 0.125" in text and "mean 2 longest session 3" in text and "sampled 20 observed 9" in text
    assert phase_seconds(read_metrics(tmp_path))[0] == ["gen", "other"], "times of tools are within the generation"
    plain = {name: ([1.0], [0.5]) for name in ("agents/tool/add/calls", "agents/tool/add/errors")}
    assert [spec.note for spec in tool_curves(plain)] == ["of add, a session"] * 2, "a single curve is named by the chart"
    many = {f"agents/tool/{i}/calls": ([1.0], [float(i)]) for i in range(2 * MOST_TOOLS)}
    assert [label for _, label in tool_curves(many)[0].metrics] == [str(2 * MOST_TOOLS - 1 - i) for i in range(MOST_TOOLS)]
    assert not [spec for spec in tool_curves({}) if spec.metrics]


def test_events_are_shown_and_escaped(tmp_path: Path) -> None:
    make_run(tmp_path, steps=2)
    assert "What happened" not in Page(write_report(tmp_path).read_text()).text
    Events(tmp_path).add(2, "<img>restart", f"a worker\ndied {HOSTILE}")
    page = Page(write_report(tmp_path).read_text())
    assert "What happened" in page.text and f"<img>restart a worker died {HOSTILE}" in page.text
    assert not [tag for tag, _ in page.tags if tag == "img"]

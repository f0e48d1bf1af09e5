import time
from pathlib import Path

from workers.rollout.progress import SECONDS, Progress, ProgressCounts, progress_file, read_progress


def test_engines_add_up_and_the_last_word_is_never_late(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == ProgressCounts(0, 0, 0, 0.0)
    before = time.time()
    engines = [Progress(progress_file(tmp_path, engine)) for engine in range(2)]
    for engine in engines:
        engine.begin(10)
    engines[0].record(10, 70)  # all of it: at once
    engines[1].record(4, 30)  # too soon after the last write
    standing = read_progress(tmp_path)
    assert standing[:3] == (10, 20, 70) and before <= standing.started <= time.time()
    time.sleep(SECONDS)
    engines[1].record(6, 50)
    assert read_progress(tmp_path)[:3] == (16, 20, 120)
    engines[0].begin(3)
    assert read_progress(tmp_path)[:3] == (6, 13, 50)
    for engine in engines:
        engine.close()


def test_recording_every_engine_step_is_cheap(tmp_path: Path) -> None:
    progress = Progress(progress_file(tmp_path, 0))
    progress.begin(10**6)
    before = time.thread_time()
    for done in range(20_000):
        progress.record(done, done)
    assert (time.thread_time() - before) / 20_000 < 2e-5
    progress.close()

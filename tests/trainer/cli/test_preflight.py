"""Missing or invalid files that a configuration names: one line each, and nothing is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.base.keys import CONFIG_DIR
from configs.compose import compose
from configs.schema.ppo import PPOConfig
from tests.broken import ACTOR, ADVICE, MODEL, PROGRAMS, ROLLOUT, broken_task, check, elsewhere, problems_of  # noqa: F401 - a fixture
from trainer.cli.preflight import ppo_inputs

# Missing or invalid files: reported before any heavy import, except for the last ones.
KEY = "reward.custom_reward_function"
FILES = [
    (f"{MODEL}.path={{task}}/gone", f"{MODEL}.path={{task}}/gone: no such directory"),
    (f"{MODEL}.path={{task}}/train.parquet", f"{MODEL}.path={{task}}/train.parquet: a file, not a directory"),
    (f"{MODEL}.path={{task}}/nothing", f"{MODEL}.path={{task}}/nothing: no config.json there"),
    (f"{MODEL}.path={{task}}/no_config", f"{MODEL}.path={{task}}/no_config: no config.json there"),
    (f"{MODEL}.path={{task}}/no_weights", f"{MODEL}.path={{task}}/no_weights: no *.safetensors there"),
    (
        f"{MODEL}.path={{task}}/pickled",
        f"{MODEL}.path={{task}}/pickled: no *.safetensors there, and pytorch_model.bin is a pickle",
    ),
    (f"{MODEL}.path={{task}}/pointer", f"{MODEL}.path={{task}}/pointer: model.safetensors is not what its name says"),
    (f"{MODEL}.path={{task}}/half", f"{MODEL}.path={{task}}/half: model.safetensors has "),
    (f"{MODEL}.path={{task}}/parts", f"{MODEL}.path={{task}}/parts: 1 of 2 parts of the weights are not there"),
    (f"{MODEL}.path={{task}}/torn_config", f"{MODEL}.path={{task}}/torn_config: config.json is not what its name says"),
    (f"{MODEL}.path={{task}}/no_tokenizer", f"{MODEL}.path={{task}}/no_tokenizer: no tokenizer there"),
    (f"{MODEL}.tokenizer_path={{task}}/nothing", f"{MODEL}.tokenizer_path={{task}}/nothing: no tokenizer there"),
    ("algorithm=ppo critic.model.path=./gone", "critic.model.path=./gone: no such directory"),
    ("critic.enable=true critic.model.path='~/gone'", "critic.model.path={task}/gone: no such directory"),
    ("reward.models={a:{path:{task}/gone}}", "reward.models.a.path={task}/gone: no such directory"),
    (
        "reward.models={a:{path:{task}/base,chat_template:gone.jinja}}",
        "reward.models.a.chat_template=gone.jinja: no such file",
    ),
    ("data.train_files={task}/gone.parquet", "data.train_files={task}/gone.parquet: no such file; {task} has "),
    ("data.train_files={task}/gone/x.parquet", "data.train_files={task}/gone/x.parquet: no such file; there is no directory"),
    ("data.train_files={task}/train.csv", "data.train_files={task}/train.csv: not a .parquet, .jsonl or .json file"),
    ("data.train_files=[]", "data.train_files=[]: no data file is given"),
    ("data.train_files={task}/empty.parquet", "data.train_files={task}/empty.parquet: has no rows"),
    ("data.train_files={task}/blank.jsonl", "data.train_files={task}/blank.jsonl: has no rows"),
    ("data.train_files={task}/torn.parquet", "data.train_files={task}/torn.parquet: cannot be read"),
    ("data.train_files={task}/text.parquet", "data.train_files={task}/text.parquet: cannot be read"),
    ("data.train_files={task}/latin.jsonl", "data.train_files={task}/latin.jsonl: cannot be read"),
    ("data.train_files={task}/broken.jsonl", "data.train_files={task}/broken.jsonl, line 1: not JSON"),
    ("data.train_files={task}/list.jsonl", "data.train_files={task}/list.jsonl, line 1: a list"),
    ("data.train_files={task}/columns.jsonl", "data.train_files={task}/columns.jsonl: no column 'prompt'; it has question"),
    ("data.train_files={task}/no_prompt.parquet", "data.train_files={task}/no_prompt.parquet: no column 'prompt'"),
    ("data.train_files={task}/no_truth.parquet", "data.train_files={task}/no_truth.parquet: column 'reward_model' has no field"),
    ("data.train_files={task}/text_info.parquet", "data.train_files={task}/text_info.parquet: column 'extra_info' is string; it"),
    (
        f"data.train_files={{task}}/list_source.parquet {KEY}.path=null",
        "data.train_files: {task}/list_source.parquet, row 0: data_source is ['sort_digits'], a list; it must be a text or null",
    ),
    (
        f"data.train_files=[{{task}}/train.parquet,{{task}}/number_source.parquet] {KEY}.path=null",
        "data.train_files: data_source '3' has no scorer; known: ",
    ),
    ("data.val_files={task}/no_struct.parquet", "data.val_files={task}/no_struct.parquet: column 'reward_model' has no field"),
    ("data.prompt_key=question", "data.train_files={task}/train.parquet: no column 'question'"),
    (
        f"data.train_files={{task}}/no_source.parquet {KEY}.path=null",
        "data.train_files: data_source '' has no scorer",
    ),
    ("data.train_files={task}/few.parquet", "data.train_batch_size=8: data.train_files has 3 rows"),
    (
        f"data.train_files={{task}}/strange_source.parquet {KEY}.path=null",
        "data.train_files: data_source 'sort_digit' has no scorer",
    ),
    ("data.ptx_files={task}/train.parquet data.ptx_max_length=64", "data.ptx_files={task}/train.parquet: no column 'response'"),
    (f"{KEY}.path={{task}}/gone.py", f"{KEY}.path={{task}}/gone.py: no such file; {{task}} has "),
    (f"{KEY}.path={{task}}/reward.txt", f"{KEY}.path={{task}}/reward.txt: not a Python file"),
    (f"{KEY}.path={{task}}/syntax.py", f"{KEY}.path={{task}}/syntax.py: syntax.py does not load: SyntaxError"),
    (f"{KEY}.path={{task}}/other.py", f"{KEY}.path={{task}}/other.py: other.py has no function compute_score; it has score"),
    (f"{KEY}.name=reward", f"{KEY}.path={{task}}/reward.py: reward.py has no function reward; it has compute_score"),
    ("trainer.resume_mode=resume_path trainer.resume_from_path=gone", "trainer.resume_from_path=gone: no such directory"),
    ("algorithm.adv_estimator={task}/gone.py:mine", "algorithm.adv_estimator={task}/gone.py:mine: no such file"),
    (
        "algorithm.adv_estimator={task}/other.py:mine",
        "algorithm.adv_estimator={task}/other.py:mine: other.py has no function mine",
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode={{task}}/syntax.py:mine",
        f"{ACTOR}.policy_loss.loss_mode={{task}}/syntax.py:mine: syntax.py",
    ),
]
LATE = [
    ("trainer.logger=[wnadb]", "trainer.logger=wnadb: no logger wnadb; there are "),
    (f"{KEY}.path={{task}}/raises.py", f"{KEY}.path={{task}}/raises.py: raises.py does not load: ModuleNotFoundError"),
    (
        f"{KEY}.path={{task}}/odd.py",
        f"{KEY}.path={{task}}/odd.py: compute_score must take data_source, ",
    ),
    (f"{KEY}.reward_kwargs={{ground_truth:1}}", f"{KEY}.reward_kwargs: ground_truth is passed with every response"),
    ("data.max_prompt_length=2", "16 of 16 prompts are longer than data.max_prompt_length=2 tokens"),
    ("data.max_prompt_length=2 data.filter_overlong_prompts=true", "data.filter_overlong_prompts leaves no prompt"),
    ("data.train_files={task}/nothing_asked.parquet", "nothing_asked.parquet, row 0: the prompt has no message; "),
    (f"{MODEL}.path={{task}}/unknown_kind", "model.path={task}/unknown_kind: "),
    (f"{MODEL}.tokenizer_path={{task}}/other_words", f"{MODEL}.tokenizer_path"),
    (f"{MODEL}.path={{task}}/no_template", "{task}/no_template has no chat template"),
    (f"{MODEL}.override_config.rms_norm_epsilon=1", "model.override_config: rms_norm_epsilon not in the config of "),
    (f"{MODEL}.lora_adapter_path={{task}}/nothing", "{task}/nothing"),
    (f"{MODEL}.router_aux_loss_coef=0.1", "model.router_aux_loss_coef=0.1: "),
    ("reward.models={a:{path:{task}/base}}", "reward.models.a: model.path={task}/base: Qwen2ForCausalLM has no score head"),
    ("reward.models={a:{path:{task}/three_labels}}", "reward.models.a: model.path={task}/three_labels: "),
    (
        "trainer.resume_mode=resume_path trainer.resume_from_path={task}/no_step",
        "trainer.resume_from_path={task}/no_step: no manifest",
    ),
    ("trainer.default_local_dir={task}/lost", "names step '7', but the checkpoints there are of steps []"),
]
OTHERS = [
    ("ppo", "actor_rollout_ref.model.path: must be set, for example actor_rollout_ref.model.path=Qwen/Qwen3-0.6B (Hugging Face "),
    ("ppo trainer.dry_run=config algorithm=ppo", "actor_rollout_ref.model.path: must be set, for example "),
    ("sft", "model.path: must be set, for example model.path="),
    ("reward_model", "model.path: must be set, for example model.path="),
    ("generation", "actor_rollout_ref.model.path: must be set, for example "),
    ("parity", "model: must be set, for example model="),
    ("serve", "model: must be set, for example model="),
    ("serve_reward judge_engine.enable=true", "judge_engine.model.path: must be set, for example judge_engine.model.path="),
    ("sft model.path=/gone", "model.path=/gone: no such directory"),
    (
        "sft model.path={task}/base data.train_files={task}/train.parquet",
        "data.train_files={task}/train.parquet: no column 'response'",
    ),
    ("sft model.path={task}/base data.train_files=[]", "data.train_files=[]: no data file is given; name one, or a list"),
    ("dpo model.path={task}/base data.train_files=[]", "data.train_files=[]: no data file is given"),
    ("reward_model model.path={task}/base data.train_files=[]", "data.train_files=[]: no data file is given"),
    (
        "sft trainer.dry_run=config trainer.test_freq=1 data.val_files=[]",
        "trainer.test_freq=1: no validation data; set data.val_",
    ),
    ("generation data.path=[]", "data.path=[]: no data file is given"),
    ("sft model.path={task}/base trainer.test_freq=1 data.val_files=gone.jsonl", "data.val_files=gone.jsonl: no such file"),
    (
        "sft data.messages_key=talk model.path={task}/base data.train_files={task}/train.parquet",
        "data.train_files={task}/train.parquet: no column 'talk'",
    ),
    (
        "sft data.messages_key=prompt data.tools_key=box model.path={task}/base data.train_files={task}/train.parquet",
        "data.train_files={task}/train.parquet: no column 'box'",
    ),
    (
        "sft trainer.resume_mode=resume_path trainer.resume_from_path=gone",
        "trainer.resume_from_path=gone: no such directory",
    ),
    ("sft trainer.export_dir={task}/reward.py", "trainer.export_dir={task}/reward.py: {task}/reward.py is a file; choose a dir"),
    ("dpo trainer.export_dir={task}/reward.py/new", "trainer.export_dir={task}/reward.py/new: {task}/reward.py is a file"),
    (
        "reward_model model.path={task}/base trainer.export_dir={task}/gone/../base/",
        "trainer.export_dir={task}/gone/../base/: model.path is the same directory, and its weights would be overwritten",
    ),
    (
        "sft model.lora_adapter_path={task}/adapter trainer.export_dir={task}/adapter",
        "trainer.export_dir={task}/adapter: model.lora_adapter_path is the same directory",
    ),
    (
        "sft trainer.export_dir={task}/adapter",
        "trainer.export_dir={task}/adapter: {task}/adapter/adapter_config.json is of an adapter, with which transformers could",
    ),
    ("reward_model model.path={task}/no_tokenizer", "model.path={task}/no_tokenizer: no tokenizer there"),
    (
        "reward_model model.path={task}/base data.train_files={task}/preferences.parquet data.margin_key=gap",
        "data.train_files={task}/preferences.parquet: no column 'gap'",
    ),
    ("reward_model trainer.test_freq=-1 data.val_files=gone.jsonl", "data.val_files=gone.jsonl: no such file"),
    (
        "generation data.path={task}/no_struct.parquet",
        "data.path={task}/no_struct.parquet: column 'reward_model' is string; it must be a struct (an object) or null",
    ),
    ("generation data.path=/gone.parquet", "data.path=/gone.parquet: no such file"),
    ("generation actor_rollout_ref.model.path=/gone", "actor_rollout_ref.model.path=/gone: no such directory"),
]
# Lines whose own files are valid, though files of other lines are not.
FINE = [
    f"data.train_files={{task}}/strange_source.parquet {KEY}.path=null data.train_max_samples=8",
    f"data.val_files={{task}}/strange_source.parquet {KEY}.path=null data.val_max_samples=8",
    f"data.train_files={{task}}/strange_source.parquet {KEY}.path=null data.filter_overlong_prompts=true",
    f"data.train_files={{task}}/strange_source.parquet {KEY}.path=null reward.scorer=exact_match",
    "data.train_files={task}/no_truth.parquet reward.remote_urls=['http://host/'] " + f"{KEY}.path=gone.py",
    "data.train_batch_size=16",
    "data.train_files='~/train.parquet' actor_rollout_ref.model.path='~/base'",
    "reward.models={a:{path:'~/base',chat_template:'~/reward.py'}}",
    "trainer.resume_mode=resume_path trainer.resume_from_path=s3://bucket/run/global_step_4",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return broken_task(tmp_path_factory.mktemp("task"))


def valid(task: Path) -> list[str]:
    """A command line that trainer.dry_run=full accepts."""
    return [
        "recipe=quickstart", "trainer.backend=local", "trainer.n_gpus_per_node=1", "trainer.logger=[]", "reward.num_workers=0",
        f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet",
        f"{MODEL}.path={task}/base", f"critic.model.path={task}/base",
        f"reward.custom_reward_function.path={task}/reward.py",
        "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.n=4",
        "trainer.total_training_steps=2", "trainer.default_local_dir=run", "trainer.dry_run=full",
    ]  # fmt: skip


def of(words: str, task: Path) -> str:
    return words.replace("{task}", str(task))


def test_unbroken_line_is_valid(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS["ppo"](valid(task)) == 0, capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [*FILES, *LATE])
def test_missing_or_invalid_file_is_a_one_line_error(
    words: str, message: str, task: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(task))
    check("ppo", [*valid(task), *of(words, task).split()], [of(message, task)], capsys)


@pytest.mark.parametrize("words", FINE)
def test_unused_file_is_not_checked(words: str, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(task))
    config = compose("ppo_trainer", PPOConfig, [*valid(task), *of(words, task).split()])
    assert list(ppo_inputs(config)) == []


@pytest.mark.parametrize("words", [f"{MODEL}.path={{task}}/gone", "data.train_files=[{task}/few.parquet,{task}/torn.parquet]"])
def test_one_mistake_is_reported_in_one_line(words: str, task: Path) -> None:
    """Though the missing directory has no tokenizer either, and the readable file has too few rows."""
    config = compose("ppo_trainer", PPOConfig, [*valid(task), *of(words, task).split()])
    (line,) = ppo_inputs(config)
    assert line.startswith((f"{MODEL}.path={task}/gone: ", f"data.train_files={task}/torn.parquet: "))


@pytest.mark.parametrize(("words", "message"), OTHERS)
def test_other_programs_report_missing_files(words: str, message: str, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *argv = of(words, task).split()
    check(program, argv, [of(message, task)], capsys)


@pytest.mark.parametrize("words", ["data.train_files=gone.parquet", f"{KEY}.path={{task}}/raises.py"])
def test_traceback_is_shown_on_request(words: str, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*valid(task), *of(words, task).split()]
    (line,) = problems_of("ppo", argv, capsys)
    assert PROGRAMS["ppo"]([*argv, "trainer.full_traceback=true"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):" in err
    assert err.splitlines()[-1] == "error: " + line.removesuffix(" (trainer.full_traceback=true shows where)")


DIRECTORIES = ("/proc/there", "/sys/there/run", "{task}/train.parquet", "{task}/train.parquet/run")


@pytest.mark.parametrize(
    "words",
    [
        f"{MODEL}.path=/gone",
        "data.train_files={task}/empty.parquet",
        *(f"trainer.default_local_dir={directory}" for directory in DIRECTORIES),
    ],
)
def test_error_in_a_separate_process_is_one_line_without_loading_torch(words: str, task: Path) -> None:
    """In a process of its own, without a dry run: nothing is started, and torch is not loaded."""
    argv = [word for word in valid(task) if not word.startswith("trainer.dry_run")] + of(words, task).split()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer.main_ppo", *argv],
        env=os.environ | {"PYTHONPATH": str(CONFIG_DIR.parent)},
        capture_output=True,
        text=True,
    )
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("import time:", "note: "))]
    assert result.returncode == 2 and result.stdout == "" and len(lines) == 1, lines
    assert lines[0].startswith(f"error: {of(words, task)}: ") and ADVICE.search(lines[0])
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "configs" in imported and not imported & {"torch", "ray", "transformers"}
    assert not Path("run").exists()

"""Command lines of verl's public scripts: they pass unchanged, or an error names what is not supported."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs.compose import compose_with_notes
from configs.schema.ppo import PPOConfig
from trainer.algorithms.correction_rules import rejection_rules
from trainer.main_ppo import PROGRAM


@dataclass
class Known:
    """A command line. words: its arguments. refused: start of the error; "" if it passes."""

    words: list[str] = field(default_factory=list)
    refused: str = ""


def known_commands() -> dict[str, Known]:
    """Command lines by name."""
    found: dict[str, Known] = {}
    for line in Path(__file__).with_name("verl_commands.txt").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if line.startswith("["):
            command = found[head[1:-1]] = Known()
        elif head == "refused":
            command.refused = rest
        elif head == "like":
            command.words += found[rest].words
        elif line and head != "#":
            command.words.append(line)
    return found


COMMANDS = known_commands()


def composed(name: str) -> PPOConfig:
    """Compose and check like trainer.dry_run=config; raises ValueError for a problem. Neither models nor data exist."""
    config, typed, _ = compose_with_notes(PROGRAM.root, PROGRAM.schema, COMMANDS[name].words)
    PROGRAM.check(config, typed)
    return config


@pytest.mark.parametrize("name", COMMANDS)
def test_a_public_command_line_passes_or_is_refused_as_listed(name: str) -> None:
    try:
        composed(name)
        errors = []
    except ValueError as error:
        errors = str(error).splitlines()
    refused = COMMANDS[name].refused
    assert any(error.startswith(refused) for error in errors) if refused else errors == [], errors


def test_program_accepts_and_refuses_like_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    codes = [PROGRAM([*COMMANDS[name].words, "trainer.dry_run=config"]) for name in ("lora-megatron", "npu-sglang")]
    output = capsys.readouterr()
    assert codes == [0, 2] and output.out.startswith("configuration is fine: 8 workers on cuda")
    assert "error: trainer.device=" in output.err


def test_lora_on_megatron_is_trained_with_fsdp() -> None:
    adapter = composed("lora-megatron")
    assert {adapter.actor_rollout_ref.actor.strategy, adapter.actor_rollout_ref.ref.strategy, adapter.critic.strategy} == {"fsdp"}
    assert composed("megatron-path").actor_rollout_ref.actor.strategy == "megatron"
    assert (adapter.actor_rollout_ref.model.lora_rank, adapter.actor_rollout_ref.model.lora_alpha) == (16, 32.0)


def test_rejection_threshold_becomes_a_rejection_rule() -> None:
    correction = composed("correction-0.6").algorithm.rollout_correction
    assert rejection_rules(correction) == [("seq_mean_k1", math.log(1 / 1.001), math.log(1.001))]
    assert correction.loss_type == "reinforce" and correction.bypass_mode


def test_a_command_line_with_a_share_of_conversations_that_verl_ends_has_a_note() -> None:
    _, _, notes = compose_with_notes(PROGRAM.root, PROGRAM.schema, COMMANDS["gsm8k-multiturn-0.7"].words)
    (note,) = [note for note in notes if "over_sample_rate" in note]
    assert note.startswith(
        "actor_rollout_ref.rollout.over_sample_rate=0.1: results differ from verl's: every response is awaited"
    )


def test_a_file_of_agent_loops_enables_conversations() -> None:
    """verl's loops run without multi_turn.enable, which these lines lack."""
    for name in ("langgraph-slurm", "langgraph-gpt-oss-slurm"):
        config, _, notes = compose_with_notes(PROGRAM.root, PROGRAM.schema, COMMANDS[name].words)
        rollout = config.actor_rollout_ref.rollout
        assert rollout.multi_turn.enable and rollout.agent.agent_loop_config_path == "recipe/langgraph_agent/example/agent.yaml"
        assert sum("agent loops run in conversations" in note for note in notes) == 1


def test_data_set_classes_of_command_lines_are_used() -> None:
    names = [
        name for name, command in COMMANDS.items() if any(word.startswith("data.custom_cls.path=") for word in command.words)
    ]
    assert len(names) == 5
    for name in names:
        assert composed(name).data.custom_cls.name == "CustomRLHFDataset"


def test_at_least_80_percent_of_the_command_lines_pass() -> None:
    passing = [name for name, command in COMMANDS.items() if not command.refused]
    assert len(COMMANDS) >= 55 and len(passing) >= 0.8 * len(COMMANDS)

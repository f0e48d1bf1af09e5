"""Export a checkpoint to a Hugging Face or peft directory: on the CPU, in one process, without a process group.

Everything needed is in the role's directory: shards, config.json and tokenizer. The shards are read into tensors of the model's
own dtype, one weight at a time, so the peak memory is that of one copy of the weights in that dtype. The output is written under
an incomplete name, loaded once by transformers as a check, and then renamed.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from configs.base.locks import LOCK, locked
from configs.schema.evaluation import ExportConfig
from trainer.checkpoint.hub import check_hub, push, write_card
from trainer.checkpoint.manifest import INCOMPLETE, MANIFEST, Checkpoint, Damaged, read_checkpoint
from trainer.checkpoint.remote_copies import RemoteCopies, is_url
from trainer.checkpoint.resume import find_latest
from trainer.run.run_dir import fsync_tree
from workers.engine.base import Head
from workers.engine.hf.checkpoint import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, saved_tensors
from workers.engine.hf.hf_model import PackedModel, auto_class, keep_generation_config

WEIGHTS = "model."
AVERAGES = "optimizer.ema."
WRITTEN_ANEW = ("config.json", "generation_config.json")


def run(config: ExportConfig) -> None:
    """Export one role of a checkpoint to ``config.output``, and push it if ``config.hub`` is set.

    Raises ValueError if the checkpoint or its role does not exist, if the output already exists, or if the push fails; Damaged
    if a file differs from the manifest or the exported model does not load completely.
    """
    if config.hub is not None:
        check_hub(config.hub)  # first: an export may take minutes
    output = Path(config.output)
    if output.exists():
        raise ValueError(f"output={output}: is there already; name another directory, or remove it")
    with opened(config.checkpoint, output) as checkpoint, ExitStack() as stack:
        role = role_of(checkpoint, config.role)
        # Hash the files of this role only: a checkpoint that has lost its critic still yields its actor.
        checkpoint = read_checkpoint(checkpoint.path, [role])
        partial = stack.enter_context(empty(output.with_name(output.name + INCOMPLETE)))
        source = checkpoint.role(role)
        has_adapter = (source / ADAPTER_CONFIG).exists()
        if has_adapter and config.which == "ema":
            raise ValueError(f"which=ema: {source} holds a LoRA adapter, of which no average is kept")
        if has_adapter and not config.merge:
            what, n_weights = "weights of its adapter", export_adapter(source, partial)
        else:
            what = "weights" if config.which == "trained" else "weights, their moving average,"
            export(source, partial, trust_remote_code=config.trust_remote_code, which=config.which)
            n_weights = check(partial, trust_remote_code=config.trust_remote_code)
        write_card(checkpoint, role, config.which, partial)
        # Last: the output exists only if it passed the check. The lock file was created in the directory and moved with it.
        fsync_tree(partial)
        partial.rename(output)
        (output / LOCK).unlink()
        print(f"{role} of step {checkpoint.step}: {n_weights:,} {what} in {output}", flush=True)
    if config.hub is not None:
        print(f"pushed to {push(output, config.hub, checkpoint.step)}")


@contextmanager
def empty(directory: Path) -> Iterator[Path]:
    """Lock a directory for this process and empty it. Raises ValueError while another process holds the lock."""
    with locked(directory, "output"):
        # Leftovers of a killed export. They are removed under the lock, because they could be those of a running one.
        for left in directory.iterdir():
            if left.name != LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield directory


@contextmanager
def opened(place: str, output: Path) -> Iterator[Checkpoint]:
    """The checkpoint at ``place``: a checkpoint, a run directory (its latest), or an address of either.

    A remote checkpoint is fetched to a temporary directory next to ``output`` and removed afterwards.
    Raises ValueError if there is none.
    """
    if is_url(place):
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent) as folder:
            address, _, name = place.rstrip("/").rpartition("/")
            if name.startswith("global_step_"):
                yield RemoteCopies(address).fetch(name, Path(folder))
            else:
                newest = RemoteCopies(place).fetch_newest(Path(folder))
                if newest is None:
                    raise ValueError(f"checkpoint={RemoteCopies(place).name}: there is no checkpoint")
                yield newest
        return
    path = Path(place)
    if not path.is_dir():
        raise ValueError(f"checkpoint={path}: there is no such directory")
    if (path / MANIFEST).exists():
        yield read_checkpoint(path, [])
        return
    latest = find_latest(path, lambda step, damage: print(f"{damage}; the one before it is taken", file=sys.stderr))
    if latest is None:
        raise ValueError(
            f"checkpoint={path}: neither a checkpoint nor a run directory that has one; trainer.save_freq=50 writes some"
        )
    yield latest


def role_of(checkpoint: Checkpoint, role: str | None) -> str:
    """``role``, or if None the only role of the checkpoint, else "actor". Raises ValueError if the checkpoint lacks it."""
    roles = checkpoint.manifest.roles
    if role is None:
        role = roles[0] if len(roles) == 1 else "actor"
    if role not in roles:
        raise ValueError(f"role={role}: {checkpoint.path} holds {', '.join(roles)}")
    return role


def export(source: Path, target: Path, *, trust_remote_code: bool, which: str = "trained") -> None:
    """Write the model in ``source`` (a role's directory) to ``target`` (empty), with an adapter merged into its base model.

    which: "trained" or "ema". Averages exist for trained parameters only; the others are exported as they are.
    """
    transformers.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    head = head_of(config)
    # The model only provides its dtype and save_pretrained. On the meta device it allocates no memory; the weights follow below.
    with torch.device("meta"):
        shell: PreTrainedModel = auto_class(config, head).from_config(
            config, dtype=config.dtype, trust_remote_code=trust_remote_code
        )
    keep_generation_config(shell, source)
    merge = (source / ADAPTER_CONFIG).exists()
    weights = merged_weights(source, config, head, trust_remote_code) if merge else read_weights(source, WEIGHTS, shell.dtype)
    if which == "ema":
        weights |= read_averages(source, shell.dtype)
    shell.save_pretrained(target, state_dict=weights)
    copy_others(source, target, {*WRITTEN_ANEW, ADAPTER_CONFIG})


def copy_others(source: Path, target: Path, without: Collection[str]) -> None:
    """Copy the tokenizer's files: everything in ``source`` but weights and the names in ``without``."""
    for path in source.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in without:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def export_adapter(source: Path, target: Path) -> int:
    """Write a peft directory, which PeftModel.from_pretrained loads on top of the base model. Returns its number of weights."""
    weights = read_weights(source, ADAPTER, None)
    save_file(weights, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    copy_others(source, target, WRITTEN_ANEW)
    return sum(weight.numel() for weight in weights.values())


def merged_weights(source: Path, config: PretrainedConfig, head: Head, trust_remote_code: bool) -> dict[str, Tensor]:
    """Weights of the base model with the adapter of the checkpoint ``source`` added, in place, one weight after the other.

    Raises ValueError if the base model is no longer at the path that the adapter's configuration names.
    """
    from workers.engine.fsdp.lora import merge_from

    base = json.loads((source / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    # The base model has no value head, and transformers would print a table of missing weights. The adapter provides the head.
    transformers.logging.set_verbosity_error()
    try:
        hf = auto_class(config, head).from_pretrained(
            base, config=config, dtype=config.dtype, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except OSError as error:
        raise ValueError(
            f"merge=true: the adapter's base model is not at {base}, where {source / ADAPTER_CONFIG} says; merge=false needs none"
        ) from error
    with TemporaryDirectory() as folder:
        export_adapter(source, Path(folder))
        return merge_from(Path(folder), PackedModel(hf, head))


def read_weights(source: Path, prefix: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Read the full tensors whose names start with ``prefix``, from the shards of any number of ranks; keys omit the prefix.

    dtype: of floating-point tensors; None: as saved.
    """
    weights = {
        name: torch.empty(saved.shape, dtype=dtype if dtype and saved.is_floating_point() else saved.dtype)
        for name, saved in saved_tensors(str(source)).items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: a single process reads all shards
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(source)), no_dist=True)
    return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def check(directory: Path, *, trust_remote_code: bool) -> int:
    """Load the exported model with transformers and count its weights.

    Raises Damaged if a weight is missing, unexpected or of another shape. from_pretrained itself accepts missing weights: it
    initializes them and logs a warning.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    model, report = auto_class(config, head_of(config)).from_pretrained(  # type: ignore[misc] # a pair, with output_loading_info
        directory, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise Damaged(f"{directory}: transformers finds {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))[:3]}")
    return sum(param.numel() for param in model.parameters())


def head_of(config: PretrainedConfig) -> Head:
    """Head of the model, from the name of its architecture: "value", "reward" or "lm"."""
    assert config.architectures, "write_description names it"
    kinds: dict[str, Head] = {"ForTokenClassification": "value", "ForSequenceClassification": "reward"}
    return next((head for name, head in kinds.items() if config.architectures[0].endswith(name)), "lm")


def read_averages(source: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the moving averages of the trained weights, like read_weights. Raises ValueError if the checkpoint has none."""
    averages = read_weights(source, AVERAGES, dtype)
    if not averages:
        raise ValueError(
            f"which=ema: {source} has no moving average; a run with actor_rollout_ref.actor.ema_decay keeps the actor's"
        )
    return averages

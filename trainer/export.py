"""A Hugging Face directory from a checkpoint: on the CPU, in one process, with no process group.

Besides the weights it needs nothing but what lies in the role's directory. The shards are read into tensors of the model's own
type, one weight at a time, so that it takes the memory of one such copy.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from configs.schema.export import ExportConfig
from trainer.checkpoint import find_latest
from trainer.manifest import INCOMPLETE, MANIFEST, Checkpoint, Damaged, read_checkpoint
from trainer.remote_copies import RemoteCopies, is_url
from trainer.run_dir import fsync_tree
from workers.engine.base import Head
from workers.engine.checkpoint import saved_tensors
from workers.engine.hf_model import auto_class

WEIGHTS = "model."
WRITTEN_ANEW = ("config.json", "generation_config.json")


def run(config: ExportConfig) -> None:
    """Raises ValueError if there is no such checkpoint, it has no such role, or the output is there already."""
    output = Path(config.output)
    if output.exists():
        raise ValueError(f"output={output}: is there already; name another directory, or remove it")
    with opened(config.checkpoint, output) as checkpoint:
        role = role_of(checkpoint, config.role)
        checkpoint = read_checkpoint(checkpoint.path, [role])
        partial = output.with_name(output.name + INCOMPLETE)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        export(checkpoint.role(role), partial, trust_remote_code=config.trust_remote_code)
        n_weights = check(partial, trust_remote_code=config.trust_remote_code)
        fsync_tree(partial)
        partial.rename(output)
        print(f"{role} of step {checkpoint.step}: {n_weights:,} weights in {output}")


@contextmanager
def opened(place: str, output: Path) -> Iterator[Checkpoint]:
    """The checkpoint at ``place``; from an address it is fetched, for as long as the context lasts, beside ``output``."""
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
        raise ValueError(f"checkpoint={path}: neither a checkpoint nor a run directory that has one")
    yield latest


def role_of(checkpoint: Checkpoint, role: str | None) -> str:
    roles = checkpoint.manifest.roles
    if role is None:
        role = roles[0] if len(roles) == 1 else "actor"
    if role not in roles:
        raise ValueError(f"role={role}: {checkpoint.path} holds {', '.join(roles)}")
    return role


def export(source: Path, target: Path, *, trust_remote_code: bool) -> None:
    """source: a role's directory. target: an empty one."""
    transformers.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    head = head_of(config)
    with torch.device("meta"):
        shell: PreTrainedModel = auto_class(config, head).from_config(
            config, dtype=config.dtype, trust_remote_code=trust_remote_code
        )
    if head == "lm":
        shell.generation_config = GenerationConfig.from_pretrained(source)
    weights = read_weights(source, shell.dtype)
    shell.save_pretrained(target, state_dict=weights)
    for path in source.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in WRITTEN_ANEW:  # the tokenizer's
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def read_weights(source: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The full tensors under their Hugging Face names, floating point ones in ``dtype``, however many ranks wrote them."""
    weights = {
        name: torch.empty(saved.shape, dtype=dtype if saved.is_floating_point() else saved.dtype)
        for name, saved in saved_tensors(str(source)).items()
        if name.startswith(WEIGHTS)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what we want
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(source)), no_dist=True)
    return {name.removeprefix(WEIGHTS): weight for name, weight in weights.items()}


def check(directory: Path, *, trust_remote_code: bool) -> int:
    """Load it as anybody would, and count its weights. Raises Damaged if a weight is missing, too many, or of another shape."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    model, report = auto_class(config, head_of(config)).from_pretrained(  # type: ignore[misc] # a pair, with output_loading_info
        directory, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise Damaged(f"{directory}: transformers finds {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))[:3]}")
    return sum(param.numel() for param in model.parameters())


def head_of(config: PretrainedConfig) -> Head:
    assert config.architectures, "write_description names it"
    kinds: dict[str, Head] = {"ForTokenClassification": "value", "ForSequenceClassification": "reward"}
    return next((head for name, head in kinds.items() if config.architectures[0].endswith(name)), "lm")

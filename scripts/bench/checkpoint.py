"""What a checkpoint costs a rank: how long training waits, how long writing takes, and what the hashes are of it, as JSON.

    python scripts/bench/checkpoint.py --hidden_size 1024 --layers 6

One rank on CPU, parameters and both moments in float32; seconds, and GB of 1e9 bytes. export: the checkpoint's weights as
a Hugging Face directory in float32, in a process of its own; its memory is the most that was resident.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Self

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from configs.schema.common import FSDPConfig, ModelConfig, TiledMLPConfig
from trainer.export import check, export
from workers.engine import make_engine
from workers.engine.base import EngineSpec, OptimizerSpec
from workers.engine.saving import sha256_of


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return round(time.perf_counter() - started, 3)


def spec_of(path: str) -> EngineSpec:
    return EngineSpec(
        model=ModelConfig(
            path=path,
            trust_remote_code=False,
            enable_gradient_checkpointing=False,
            enable_activation_offload=False,
            tiled_mlp=TiledMLPConfig(enabled=False, num_shards=4),
            override_config={},
            lora_rank=0,
            lora_alpha=16.0,
            target_modules="all-linear",
            lora_adapter_path=None,
            router_aux_loss_coef=0.0,
        ),
        head="lm",
        sharding=FSDPConfig(
            model_dtype="float32",
            dtype="float32",
            reshard_after_forward=True,
            use_no_sync_for_gradient_accumulation=False,
            param_offload=False,
            optimizer_offload=False,
            fsdp_size=-1,
            ulysses_sequence_parallel_size=1,
        ),
        optimizer=OptimizerSpec(
            lr=1e-4,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            schedule="constant",
            warmup_steps=0,
            total_steps=1,
            min_lr_ratio=0.0,
            num_cycles=0.5,
            clip_grad=1.0,
        ),
        device="cpu",
        seed=1,
    )


class Peak:
    """Of this process's own memory, in GB more than at the start; pages of files that it reads are the kernel's to drop."""

    def __enter__(self) -> Self:
        self.before = self.most = self._now()
        self.open = True
        self.thread = Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False
        self.thread.join()

    @property
    def more(self) -> float:
        return round((self.most - self.before) / 1e9, 3)

    def _now(self) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    def _watch(self) -> None:
        while self.open:
            self.most = max(self.most, self._now())
            time.sleep(0.002)


def exported(source: str, target: str) -> dict[str, float]:
    """In a process of its own: what it took."""
    Path(target).mkdir()
    with Peak() as exporting:
        spent = seconds(lambda: export(Path(source), Path(target)))
    with Peak() as checking:
        checked = seconds(lambda: check(Path(target)))
    return {"seconds": spent, "GB": exporting.more, "seconds of the check": checked, "GB of the check": checking.more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    said: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen2Config(
            hidden_size=args.hidden_size,
            num_hidden_layers=args.layers,
            intermediate_size=3 * args.hidden_size,
            num_attention_heads=args.hidden_size // 64,
            num_key_value_heads=args.hidden_size // 128,
            vocab_size=8192,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(f"{folder}/model")
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        engine = make_engine(spec_of(f"{folder}/model"))
        said["waiting"] = seconds(lambda: engine.save(f"{folder}/waiting").result())
        said["in the background"] = []
        for k in range(3):
            started = time.perf_counter()
            saving = engine.save(f"{folder}/{k}", background=True)
            waited = round(time.perf_counter() - started, 3)
            saving.result()
            said["in the background"] += [{"training waits": waited, "whole": round(time.perf_counter() - started, 3)}]
        files = list(Path(folder, "waiting").glob("*.safetensors"))
        said["GB"] = round(sum(file.stat().st_size for file in files) / 1e9, 3)
        said["hash"] = seconds(lambda: [sha256_of(file) for file in files])
        said["load"] = seconds(lambda: engine.load(f"{folder}/waiting"))
        with get_context("spawn").Pool(1) as pool:
            said["export"] = pool.apply(exported, (f"{folder}/waiting", f"{folder}/exported"))
        said["export"]["GB of weights"] = round(Path(folder, "exported/model.safetensors").stat().st_size / 1e9, 3)
        dist.destroy_process_group()
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()

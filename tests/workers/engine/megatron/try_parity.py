"""Scratch: the Megatron engine against plain transformers, a training step at a time.

python -m tests.workers.engine.megatron.try_parity ARCH[-tied][:value] case ...   (several ARCH words may be mixed in)
"""

import faulthandler
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.multiprocessing import spawn
from transformers import AutoConfig, AutoModelForTokenClassification

from configs.schema.common import MegatronConfig, ModelConfig
from tests.tiny import save_tiny_model
from tests.workers.engine.toy import ADAMW, ToyLoss, ValueLoss, plain_loss, plain_model, plain_outputs, toy_batch
from workers.engine.base import EngineSpec
from workers.plan import Limits, make_plan

transformers.logging.disable_progress_bar()
COUNTS = [int(n) for n in os.environ.get("COUNTS", "3,1,2,5,4").split(",")]
LENGTHS = [7, 12, 3, 9, 5, 2]


def spec_of(path, head="lm", **m):
    base = dict(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1, sequence_parallel=False, use_distributed_optimizer=False, dtype="float32",
        param_offload=False, grad_offload=False, optimizer_offload=False, override_transformer_config={},
    )  # fmt: skip
    model = ModelConfig(
        path=path, tokenizer_path=None, trust_remote_code=False, enable_gradient_checkpointing=m.pop("recompute", False), override_config={}
    )
    given = dict(model=model, head=head, optimizer=replace(ADAMW, lr=1e-4), device="cpu", seed=1)
    sharding = MegatronConfig(**(base | m))
    if "sharding" in EngineSpec.__dataclass_fields__:
        return EngineSpec(sharding=sharding, **given)
    return EngineSpec(strategy="megatron", fsdp=None, megatron=sharding, **given)


def plain_values(model, ids):
    """values (L,) of the state before each token, 0 for the first, and of the state after the last."""
    after = model(input_ids=ids[None]).logits[0, :, 0]
    return torch.cat([after.new_zeros(1), after[:-1]]), after[-1]


def plain_value_loss(model, batch):
    total = torch.zeros((), dtype=torch.float64)
    columns = [batch.split_rows(name) for name in ("input_ids", "advantages", "loss_weight")]
    for ids, target, weight in zip(*columns, strict=True):
        loss = (weight * (plain_values(model, ids)[0] - target) ** 2).sum()
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    return total


def run(rank, world, file, path, arch, name, m, head):
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(float(os.environ.get("LIMIT", "60")) + 5 * rank, exit=True)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    from workers.engine.megatron.engine import MegatronEngine

    spec = spec_of(path, head, **m)
    engine = MegatronEngine(spec, spec.sharding) if "sharding" in EngineSpec.__dataclass_fields__ else MegatronEngine(spec)
    if head == "lm":
        plain = plain_model(path)
    else:
        plain = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32, attn_implementation="sdpa").eval()
    own = plain.state_dict()
    tied = {"lm_head.weight"} if plain.config.tie_word_embeddings and head == "lm" else set()
    got = {n: t.clone() for n, t in engine.export_weights()}
    trip = max(float((own[n] - t).abs().max()) for n, t in got.items())
    assert set(got) == set(own) - tied, set(got) ^ set(own)
    decay = [p for p in plain.parameters() if p.dim() > 1]
    rest = [p for p in plain.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": ADAMW.weight_decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-4
    )
    for step, n in enumerate(COUNTS):
        batch = toy_batch(LENGTHS, seed=step, masked=[1])
        plan = make_plan(LENGTHS, engine.mesh.dp_size, Limits(max_tokens=40))
        share = plan.split(batch)[engine.mesh.dp_rank]
        micro = tuple(tuple(range(i, len(share), n)) for i in range(n))  # ragged, and empty where rows run out
        asked = {"log_probs", "entropy", "sum_pi_squared", "top_log_probs"} if head == "lm" else {"values"}
        out = engine.forward(share, micro, asked)
        worst = 0.0
        with torch.no_grad():
            for i, ids in enumerate(share.split_rows("input_ids") if out is not None else ()):
                if head == "lm":
                    mask = share.split_rows("response_mask")[i][1:]
                    want, entropy = plain_outputs(plain, ids, 0.7)
                    pairs = [("log_probs", want), ("entropy", entropy)]
                    worst = max(worst, *(float(((out.split_rows(k)[i][1:] - w) * mask).abs().max()) for k, w in pairs))
                else:
                    want, last = plain_values(plain, ids)
                    worst = max(worst, float((out.split_rows("values")[i] - want).abs().max()), float((out.rows["last_value"][i] - last).abs()))
        metrics = engine.train_step(share, micro, ToyLoss() if head == "lm" else ValueLoss())
        plain.zero_grad()
        loss = (plain_loss if head == "lm" else plain_value_loss)(plain, batch)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        opt.step()
        off = abs(float(norm) - metrics["grad_norm"].value) / float(norm)
        mine = torch.tensor([metrics["loss"].value if engine.mesh.is_output_rank else 0.0], dtype=torch.float64)
        dist.all_reduce(mine)
        got = dict(engine.export_weights())
        apart = max(float((plain.state_dict()[k] - t).abs().max()) for k, t in got.items())
        found = torch.tensor([worst, abs(float(mine) - float(loss)), off, apart])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if rank == 0:
            bad = [w for w, x, b in zip(("logp/value", "loss", "norm", "params"), found.tolist(), (1e-5, 1e-5, 1e-5, 1e-4)) if not x < b]
            print(f"{arch}:{head} {name} n={n} trip {trip:.0e} logp/value {found[0]:.1e} loss {found[1]:.1e} norm {found[2]:.1e} "
                  f"params {found[3]:.1e} {'RED ' + ' '.join(bad) if bad or trip else 'ok'}", flush=True)  # fmt: skip
    if os.environ.get("CKPT"):
        place = f"{path}_{name}_ckpt"
        os.makedirs(place, exist_ok=True)
        dist.barrier()
        engine.save(place).result()
        dist.barrier()
        again = MegatronEngine(spec, spec.sharding)
        again.load(place)
        one, two = dict(engine.export_weights()), dict(again.export_weights())
        same = all(torch.equal(one[k], two[k]) for k in one)
        for one_engine in (engine, again):
            one_engine.train_step(share, micro, ToyLoss() if head == "lm" else ValueLoss())
        one, two = dict(engine.export_weights()), dict(again.export_weights())
        apart = max(float((one[k] - two[k]).abs().max()) for k in one)
        if rank == 0:
            print(f"{arch}:{head} {name} saved and loaded: equal {same}, a step later apart by {apart:.1e}", flush=True)
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def case(name):
    """Words joined by dots: tp2, pp2, vpp2, cp2, dp2, do2 (dp2 with the distributed optimizer), sp, rc (recompute)."""
    m, world = {}, 1
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
    for word in name.split("."):
        match word:
            case "one":
                pass
            case "sp":
                m["sequence_parallel"] = True
            case "rc":
                m["recompute"] = True
            case _ if word.startswith("vpp"):
                m["virtual_pipeline_model_parallel_size"] = int(word[3:])
            case _:
                kind, size = word[:2], int(word[2:])
                world *= size
                if kind == "do":
                    m["use_distributed_optimizer"] = True
                elif kind != "dp":
                    m[names[kind]] = size
    return world, m


def save(folder, arch, head):
    kind, _, tied = arch.partition("-")
    layers = int(os.environ.get("LAYERS", "4"))
    path = save_tiny_model(folder / f"{arch}-lm", kind, num_hidden_layers=layers, **({"tie_word_embeddings": True} if tied else {}))
    if head == "lm":
        return path
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(path, num_labels=1)
    model = AutoModelForTokenClassification.from_pretrained(path, config=config, dtype=torch.float32)
    nn.init.normal_(model.score.weight, 0.0, 0.2)
    nn.init.normal_(model.score.bias, 0.0, 0.2)
    model.save_pretrained(folder / f"{arch}-value")
    return str(folder / f"{arch}-value")


def main():
    folder = Path(tempfile.mkdtemp())
    arch, head = "qwen2", "lm"
    for word in sys.argv[1:]:
        if word.split("-")[0].split(":")[0] in ("qwen2", "qwen3", "llama"):
            arch, _, head = word.partition(":")
            head = head or "lm"
            continue
        world, m = case(word)
        path = save(folder, arch, head)
        began = time.time()
        try:
            spawn(run, args=(world, folder / f"pg_{word}_{time.time()}", path, arch, word, m, head), nprocs=world)
        except Exception as error:
            print(f"{arch}:{head} {word} FAILED: {str(error).strip()[-900:]}", flush=True)
        print(f"  {word}: {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

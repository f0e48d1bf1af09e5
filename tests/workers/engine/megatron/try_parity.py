import transformers; transformers.logging.disable_progress_bar()
import sys, os, tempfile, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.multiprocessing import spawn
from configs.schema.common import FSDPConfig, MegatronConfig, ModelConfig
from tests.tiny import save_tiny_model
from tests.workers.engine.toy import ADAMW, ToyLoss, ValueLoss, cut, plain_loss, plain_model, plain_outputs, toy_batch, plain_gradients
from workers.engine.base import EngineSpec
from dataclasses import replace

def spec_of(path, head="lm", **m):
    base = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, context_parallel_size=1, sequence_parallel=False, use_distributed_optimizer=False, dtype="float32", param_offload=False, grad_offload=False, optimizer_offload=False, override_transformer_config={})
    gc = m.pop("recompute", False)
    return EngineSpec(model=ModelConfig(path=path, tokenizer_path=None, trust_remote_code=False, enable_gradient_checkpointing=gc, override_config={}), head=head, sharding=MegatronConfig(**(base | m)), optimizer=replace(ADAMW, lr=1e-4), device="cpu", seed=1)

def run(rank, world, file, path, arch, m, head):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    from workers.engine.megatron.engine import MegatronEngine
    spec = spec_of(path, head, **m); engine = MegatronEngine(spec, spec.sharding)
    from transformers import AutoModelForCausalLM
    plain = plain_model(path) if head == "lm" else None
    # export round trip
    worst = 0.0
    if head == "lm":
        own = plain.state_dict()
        got = {n: t.clone() for n, t in engine.export_weights()}
        worst = max(float((own[n]-t).abs().max()) for n, t in got.items())
        assert set(got) <= set(own), set(got)-set(own)
    decay = [p for p in plain.parameters() if p.dim() > 1]; nodecay = [p for p in plain.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": ADAMW.weight_decay}, {"params": nodecay, "weight_decay": 0.0}], lr=1e-4)
    worst_lp = worst_n = worst_loss = 0.0
    for step in range(5):
        batch = toy_batch([7, 12, 3, 9, 5, 2], seed=step, masked=[1])
        shares, plans = cut(batch, engine.mesh.dp_size, max_tokens=20)
        out = engine.forward(shares[engine.mesh.dp_rank], plans[engine.mesh.dp_rank], {"log_probs", "entropy", "sum_pi_squared", "top_log_probs"})
        if out is not None and engine.mesh.dp_size == 1:
            for ids, lp, en, mask in zip(batch.split_rows("input_ids"), out.split_rows("log_probs"), out.split_rows("entropy"), batch.split_rows("response_mask")):
                want, ent = plain_outputs(plain, ids, 0.7)
                worst_lp = max(worst_lp, float(((lp[1:]-want)*mask[1:]).abs().max()), float(((en[1:]-ent)*mask[1:]).abs().max()))
        metrics = engine.train_step(shares[engine.mesh.dp_rank], plans[engine.mesh.dp_rank], ToyLoss())
        plain.zero_grad()
        loss = plain_loss(plain, batch)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        opt.step()
        worst_n = max(worst_n, abs(float(norm) - metrics["grad_norm"].value)/float(norm))
        l = torch.tensor([metrics["loss"].value if engine.mesh.is_output_rank else 0.0], dtype=torch.float64); dist.all_reduce(l)
        worst_loss = max(worst_loss, abs(float(l)-float(loss)))
    got = {n: t.clone() for n, t in engine.export_weights()}
    diff = max(float((plain.state_dict()[n]-t).abs().max()) for n, t in got.items())
    lp = torch.tensor([worst_lp]); dist.all_reduce(lp, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{arch} {m}: round trip {worst:.1e} logprob {float(lp):.1e} loss {worst_loss:.1e} norm {worst_n:.1e} params {diff:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()

def main():
    folder = Path(tempfile.mkdtemp())
    cases = {
      "tp2": (2, dict(tensor_model_parallel_size=2)),
      "one": (1, {}),
      "sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
      "pp2": (2, dict(pipeline_model_parallel_size=2)),
      "vpp2": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
      "dp2": (2, dict(use_distributed_optimizer=False)),
      "do2": (2, dict(use_distributed_optimizer=True)),
      "cp2": (2, dict(context_parallel_size=2)),
      "cptp": (4, dict(context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True)),
      "mix": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True, recompute=True)),
    }
    arch = sys.argv[1]
    changes = {}
    if arch.endswith("-tied"): changes["tie_word_embeddings"] = True
    for name in sys.argv[2:]:
        world, m = cases[name]
        path = save_tiny_model(folder / arch, arch.split("-")[0], num_hidden_layers=4, **changes)
        t=time.time()
        spawn(run, args=(world, folder / f"pg_{name}_{time.time()}", path, arch, m, "lm"), nprocs=world)
        print(f"  {time.time()-t:.0f} s")

if __name__ == "__main__":
    main()

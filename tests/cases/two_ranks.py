"""Two processes on the CPU (gloo), started by test_sharing.py: DDP over shared layers, FSDP2 over patched models."""

from __future__ import annotations

import copy
import functools
import tempfile

import torch
import torch.distributed as dist
import transformers as tf
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_autonorm import GateConfig, patch
from hf_autonorm.nn import AutoNorm

TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
IDS = {"input_ids": torch.arange(28).view(4, 7)}


def perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """Gates that differ from token to token, norms that are not at their start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, AutoNorm):
                for p in layer.parameters():
                    p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def shared_layers(rank: int) -> None:
    """ALBERT's one layer called three times, checkpointed: the joint batch's gradients, no unused parameter."""
    torch.manual_seed(0)
    config = tf.AlbertConfig(
        **TINY, num_hidden_layers=3, embedding_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = tf.AlbertModel(config, add_pooling_layer=False)
    perturbed(patch(model, gate=GateConfig(kind="softmax"))).train()
    alone, batch = copy.deepcopy(model), IDS
    group = model.encoder.albert_layer_groups[0]
    group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
    parallel = DistributedDataParallel(model, find_unused_parameters=False)
    for _ in range(2):
        parallel.zero_grad()
        mine = {key: value[2 * rank : 2 * rank + 2] for key, value in batch.items()}
        parallel(**mine).last_hidden_state.square().mean().backward()
    alone(**batch).last_hidden_state.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def sharded(make) -> None:
    """FSDP2 refuses 0-dimensional parameters; a frozen gate beside learning weights must not trouble it."""
    torch.manual_seed(0)
    model, inputs = make(), IDS
    patch(model.eval(), linear="affine_like")
    with torch.no_grad():
        expected = next(iter(model(**inputs).values()))
    assert all(p.dim() >= 1 for p in model.parameters())
    fully_shard(model)
    layers = [m for m in model.modules() if isinstance(m, AutoNorm)]
    with torch.no_grad():
        torch.testing.assert_close(next(iter(model(**inputs).values())), expected, rtol=1e-4, atol=1e-5)
    for layer in layers:
        layer.freeze()
    model.train()
    next(iter(model(**inputs).values())).square().mean().backward()
    assert all(p.requires_grad for layer in layers for p in layer.bias_gate.parameters())
    assert all(not p.grad.to_local().any() for layer in layers for p in layer.bias_gate.parameters())


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    shared_layers(rank)
    sharded(lambda: tf.BertModel(tf.BertConfig(**TINY, num_hidden_layers=1), add_pooling_layer=False))
    dist.barrier()
    print(f"rank {rank}: fine", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")  # nothing is computed yet, and the imports are shared
        ranks = [context.Process(target=work, args=(rank, f"{folder}/store")) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        raise SystemExit(max(abs(rank.exitcode) for rank in ranks))

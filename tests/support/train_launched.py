"""Trains a tiny model in the processes of a launch, for test_training_launched.py: `train_launched.py HOW WATCHED OUT`.

HOW: trainer (transformers' Trainer, DDP), ddp, fsdp or fully_shard (a loop of one's own). WATCHED: 0 or 1. OUT.N.pt
gets the losses of process N, the weights after training and what the callback returned.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from trainings import callback, causal_llama, ids, losses, trained

STEPS = 4


def main(how: str, watched: bool, out: str) -> None:
    if how == "trainer":
        own = callback(output=f"{out}.csv")
        trainer = trained(
            Path(f"{out}-trainer"), [own] if watched else [], ddp_backend="gloo", dataloader_num_workers=0
        )
        values = [entry for entry in trainer.state.log_history if "sink/bos_mass" in entry]
        result = {"losses": losses(trainer), "weights": trainer.model.state_dict(), "values": values}
    else:
        distributed.init_process_group("gloo")
        result = own_loop(wrapped(how, causal_llama().train()), callback(output=f"{out}.csv") if watched else None)
    torch.save(result, f"{out}.{distributed.get_rank()}.pt")
    # Nothing is taken down: gloo's threads, which FSDP's model keeps in circles of references, abort a process that
    # ends while one of them asks for the interpreter, and once kept a plain training from ending at all.
    distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wrapped(how: str, model: nn.Module) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        layers = ModuleWrapPolicy({type(model.model.layers[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=layers, device_id=torch.device("cpu"), use_orig_params=True
        )
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def own_loop(model: nn.Module, own: Any) -> dict[str, Any]:
    from sinkscope.checkpoints.wrappers import is_sharded
    from sinkscope.experiments.training.callback import gathered

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = ids(8)[distributed.get_rank() :: 2]
    found, values = [], []
    torch.manual_seed(distributed.get_rank())  # dropout differs between the processes
    for step in range(STEPS):
        if own is not None and step % own.every == 0:
            values.append(own.measure(step, model))
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    weights = gathered(model) if is_sharded(model) else model.module.state_dict()
    if own is not None:
        values.append(own.measure(STEPS, model))
    return {"losses": found, "weights": weights, "values": values}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1", sys.argv[3])

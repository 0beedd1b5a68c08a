"""What runs inside trainer processes. Arguments and results are plain, so that they can travel."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.batching.types import TrainBatch
from slime_core.errors import TrainerError
from slime_core.megatron.rank import TrainerRank
from slime_core.megatron.settings import TrainerSettings


@contextmanager
def trainer(settings: dict[str, Any]) -> Iterator[TrainerRank]:
    gc.collect()  # groups of the trainers before: gloo's threads poll until they are freed
    rank = TrainerRank(TrainerSettings(**settings))
    try:
        rank.setup()
        rank.set_state("s0")
        yield rank
    finally:
        rank.close()


def logits(settings: dict[str, Any], rows: list[list[int]]) -> np.ndarray:
    """[tokens, vocabulary] logits of all sequences in one pack."""
    import torch

    with trainer(settings) as rank:
        model = rank._trainer.state.model  # type: ignore[union-attr]
        ids = torch.tensor([token for row in rows for token in row])[None]
        lengths = [len(row) for row in rows]
        cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths])
        with torch.no_grad():
            pack = model.pack(cu, positions, max(lengths))
            hidden = model(ids, positions[None], None, packed_seq_params=pack)
            out = model.head(hidden.squeeze(1))
        return out[:, : rank._trainer.shape.vocab_size].numpy()  # type: ignore[union-attr]


def canary(settings: dict[str, Any], tokens: list[int]) -> list[float]:
    with trainer(settings) as rank:
        return rank.canary(tokens)


def export(settings: dict[str, Any], folder: str, max_file_bytes: int | None = None) -> Any:
    with trainer(settings) as rank:
        if max_file_bytes is None:
            return rank.export_hf(folder, "a-0")
        from slime_core.megatron.export import export_hf

        own = rank._trainer
        assert own is not None
        return export_hf(own.state.models, own.shape, own.settings, folder, "a-0", max_file_bytes)


def train(
    settings: dict[str, Any],
    batches: list[TrainBatch],
    load: str | None = None,
    save_after: tuple[int, str] | None = None,
    export_to: str | None = None,
    forced_skips: list[tuple[bool, ...]] | None = None,
) -> dict[str, Any]:
    """Trains batches one after another; states are numbered by batch."""
    with trainer(settings) as rank:
        assert rank._trainer is not None
        loaded, start = None, rank._trainer.start_digest()
        if load is not None:
            loaded = rank.load(load)
        first = int(rank.status()["state"][1:])
        results = []
        for number, batch in enumerate(batches, first):
            skips = forced_skips[number] if forced_skips else None
            results.append(rank.train(1, f"s{number}", f"s{number + 1}", "b", batch, number, skips))
            if save_after is not None and save_after[0] == number:
                rank.save(save_after[1])
        if export_to is not None:
            rank.export_hf(export_to, "a-1")
        return {"results": results, "loaded": loaded, "start": start}


def failed_save(rank: int, port: int, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Rank 1 may write no file of more than a few bytes: what each rank is told."""
    own = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
    with trainer(settings | own) as trainer_rank:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        try:
            trainer_rank.save(folder)
            error = ""
        except TrainerError as raised:
            error = str(raised)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        trainer_rank.save(f"{folder}-again")
        return {"error": error, "tainted": trainer_rank.status()["tainted"]}


def write_slowly(settings: dict[str, Any], batch: TrainBatch, folder: str) -> None:
    """Begins a checkpoint whose files never come to their end."""
    with trainer(settings) as rank:
        rank.train(1, "s0", "s1", "b", batch, 0)
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        plain = FileSystemWriter.write_data

        def endless(self: Any, *args: Any) -> Any:
            plain(self, *args)
            time.sleep(600)

        FileSystemWriter.write_data = endless  # type: ignore[method-assign]
        rank.begin_save(folder)
        rank.train(1, "s1", "s2", "b", batch, 1)
        Path(folder).with_suffix(".trained").touch()
        time.sleep(600)


class Runs:
    """Something in a pickle that makes a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def write_as_megatron_lm(settings: dict[str, Any], folder: str, trap: str) -> None:
    """The weights as Megatron-LM saves them, by Megatron's own writer, with a common.pt that runs
    something where it is read."""
    import argparse

    with trainer(settings) as rank:
        from megatron.core import dist_checkpointing

        assert rank._trainer is not None
        content = {
            "args": argparse.Namespace(num_layers=3, trap=Runs(trap)),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": rank._trainer.state.model.sharded_state_dict(),
        }
        place = Path(folder, "iter_0000007")
        place.mkdir(parents=True)
        dist_checkpointing.save(content, str(place), validate_access_integrity=False)
        Path(folder, "latest_checkpointed_iteration.txt").write_text("7")


def export_on_rank(rank: int, port: int, settings: dict[str, Any], folder: str) -> Any:
    """`export` on one of two ranks."""
    own = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
    return export(settings | own, folder)


def counted_passes(settings: dict[str, Any], batch: TrainBatch) -> dict[str, Any]:
    """One step, how often each kind of layer ran, and the bytes that forward kept for backward."""
    import torch

    with trainer(settings) as rank:
        from megatron.core.transformer.mlp import MLP

        from slime_core.megatron.attention import PackedAttention

        assert rank._trainer is not None
        counts = {"attention": 0, "feed_forward": 0}
        for module in rank._trainer.state.model.modules():
            for kind, name in ((PackedAttention, "attention"), (MLP, "feed_forward")):
                if isinstance(module, kind):
                    module.register_forward_pre_hook(
                        lambda *_, n=name: counts.__setitem__(n, counts[n] + 1)
                    )
        inside, kept = False, 0

        def enter(at: bool) -> None:
            nonlocal inside
            inside = at

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += inside * (tensor.nbytes if not isinstance(tensor, torch.nn.Parameter) else 0)
            return tensor

        decoder = rank._trainer.state.model.decoder
        decoder.register_forward_pre_hook(lambda *_: enter(True))
        decoder.register_forward_hook(lambda *_: enter(False))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step = rank.train(1, "s0", "s1", "b", batch, 0)["steps"][0]
        return {"step": step, "kept_bytes": kept, **counts}


def moved_masters(settings: dict[str, Any], batch: TrainBatch, steps: int) -> dict[str, Any]:
    """Largest change of a float32 master weight over some steps."""
    with trainer(settings) as rank:
        assert rank._trainer is not None
        masters = [p for g in rank._trainer.state.optimizer.param_groups for p in g["params"]]
        before = [master.detach().clone() for master in masters]
        for number in range(steps):
            rank.train(1, f"s{number}", f"s{number + 1}", "b", batch, 0)
        moved = [(m - b).abs().max().item() for m, b in zip(masters, before, strict=True)]
        return {"largest": max(moved), "dtype": str(masters[0].dtype)}


def reshard(settings: dict[str, Any], load: str, save: str, batch: TrainBatch) -> dict[str, Any]:
    """Loads a checkpoint and saves it in this layout; then the next step's numbers."""
    with trainer(settings) as rank:
        rank.load(load)
        rank.save(save)
        return rank.train(1, rank.status()["state"], "next", "b", batch, 0)["steps"][0]


def reshard_on_rank(rank: int, port: int, settings: dict[str, Any], *args: Any) -> dict[str, Any]:
    """`reshard` on one of two ranks."""
    own = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
    return reshard(settings | own, *args)


def stored_tensors(settings: dict[str, Any], folder: str) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, whole, as float32."""
    with trainer(settings):
        import torch
        from megatron.core.dist_checkpointing import load_plain_tensors

        found = load_plain_tensors(folder).items()
        return {name: t.float().numpy() for name, t in found if isinstance(t, torch.Tensor)}


def train_on_rank(rank: int, port: int, settings: dict[str, Any], *args: Any) -> dict[str, Any]:
    """`train` on one of two ranks."""
    own = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
    return train(settings | own, *args)


def disagree(rank: int, port: int, settings: dict[str, Any], batch: TrainBatch) -> Any:
    """Each rank is told of another batch; the error and whether it taints."""
    own = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
    with trainer(settings | own) as trainer_rank:
        try:
            trainer_rank.train(1, "s0", "s1", f"batch-{rank}", batch, 0)
        except TrainerError as error:
            return str(error), trainer_rank.status()["tainted"]
        return "trained", False


def device_layer() -> dict[str, Any]:
    """What "cuda" means once the CPU layer is installed."""
    import torch

    from slime_core.megatron import device

    device.install("cpu")
    device.install("cpu")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        made = torch.zeros(2, device="cuda", pin_memory=True)
    return {
        "devices": [
            str(x.device)
            for x in (
                made,
                made.to("cuda:0"),
                made.cuda(),
                made.new_ones(1, device="cuda"),
                torch.empty_like(made, device=torch.device("cuda", 1)),
                torch.nn.Linear(1, 1).to("cuda").weight,
                torch.nn.Linear(1, 1).cuda().weight,
            )
        ],
        "type": made.type(),
        "cast": made.type("torch.cuda.DoubleTensor").dtype == torch.float64,
        "elapsed_ms": start.elapsed_time(end) >= 0,
        "available": torch.cuda.is_available(),
        "memory": torch.cuda.memory_allocated(),
    }


def import_order() -> str:
    """The layer's refusal where megatron came first."""
    import megatron.core

    from slime_core.megatron import device

    assert megatron.core
    try:
        device.install("cpu")
    except TrainerError as error:
        return str(error)
    return ""


def all_to_all(rank: int, port: int) -> list[int]:
    """Split sizes given as tensors, as Megatron's expert dispatcher gives them."""
    import torch
    import torch.distributed as dist

    from slime_core.megatron import device

    device.install("cpu")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        # Rank r sends r + 1 numbers to rank 0 and 2 to rank 1.
        send = torch.tensor([rank + 1, 2])
        receive = torch.tensor([1, 2]) if rank == 0 else torch.tensor([2, 2])
        source = torch.arange(int(send.sum())) + 10 * rank
        out = torch.empty(int(receive.sum()), dtype=source.dtype)
        dist.all_to_all_single(out, source, receive, send)
        dist.barrier(device_ids=[rank])
        return out.tolist()
    finally:
        dist.destroy_process_group()


def vocabulary_parallel(rank: int, port: int, vocab: int, padded: int) -> dict[str, float]:
    """Largest differences of log-probs, entropy and gradient from whole-vocabulary softmax."""
    import torch
    import torch.distributed as dist

    from slime_core.algorithms.log_probs import log_probs_and_entropy
    from slime_core.megatron import device

    device.install("cpu")
    from slime_core.megatron.logprobs import VocabParallelLogProbs, _real_columns

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        whole = torch.randn(40, padded) * 3
        targets = torch.randint(0, vocab, (40,))
        upstream = torch.randn(2, 40)
        reference = whole.clone().requires_grad_()
        want = log_probs_and_entropy(reference[:, :vocab], targets)
        (want[0] * upstream[0] + want[1] * upstream[1]).sum().backward()
        columns = padded // 2
        own = whole[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
        real = _real_columns(own, vocab - rank * columns)
        got = VocabParallelLogProbs.apply(real, targets, rank * columns, dist.group.WORLD)
        (got[0] * upstream[0] + got[1] * upstream[1]).sum().backward()  # type: ignore[index]
        expected = reference.grad[:, rank * columns : (rank + 1) * columns]  # type: ignore[index]
        return {
            "log_probs": (got[0] - want[0]).abs().max().item(),  # type: ignore[index]
            "entropy": (got[1] - want[1]).abs().max().item(),  # type: ignore[index]
            "gradient": (own.grad - expected).abs().max().item(),  # type: ignore[operator]
        }
    finally:
        dist.destroy_process_group()


def fingerprints() -> dict[str, int]:
    """Device-side hashes of tensors that differ in one bit, two places, or a byte order."""
    import torch

    from slime_core.megatron import device

    device.install("cpu")
    from slime_core.megatron.digest import fingerprint

    base = torch.arange(1, 1001, dtype=torch.float32)
    flipped = base.view(torch.int32).clone()
    flipped[500] ^= 1
    swapped = base.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    return {
        "base": fingerprint(base),
        "again": fingerprint(base.reshape(10, 100)),
        "flipped": fingerprint(flipped.view(torch.float32)),
        "swapped": fingerprint(swapped),
        "half": fingerprint(base.bfloat16()),
        "shorter": fingerprint(base[:-1]),
    }


def probes(settings: dict[str, Any], batches: list[TrainBatch]) -> dict[str, Any]:
    """Looks at the gradient of each batch; no weight may change."""
    with trainer(settings) as rank:
        own = rank._trainer
        assert own is not None
        before = own.weights_digest()
        found = [rank.probe(batch, seed=1) for batch in batches]
        assert own.weights_digest() == before
        return {"probes": found, "trained": rank.train(0, "s0", "s1", "b", batches[0], seed=1)}

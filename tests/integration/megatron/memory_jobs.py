"""What a trainer keeps in memory, looked at inside trainer processes (see jobs.py)."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

from jobs import trainer

from slime_core.batching.types import TrainBatch
from slime_core.errors import TrainerError


def model_outlives_its_trainer(settings: dict[str, Any], batch: TrainBatch) -> bool:
    with trainer(settings) as rank:
        rank.train(1, "s0", "s1", "b", batch, 0)
        model = weakref.ref(rank._trainer.state.model)  # type: ignore[union-attr]
    del rank
    gc.collect()
    return model() is not None


def held_places(settings: dict[str, Any]) -> dict[str, list[int]]:
    """Where the parameters lie before, during and after another policy is in use."""
    with trainer(settings) as rank:
        from slime_core.megatron.roles import HeldWeights

        own = rank._trainer
        assert own is not None
        model = own.state.model
        held = HeldWeights(own.state.models, own.shape)

        def places() -> list[int]:
            return [parameter.data_ptr() for parameter in model.parameters()]

        found = {"held": [weights.data_ptr() for weights in held._held.values()]}
        found["before"] = places()
        with held.in_use():
            found["during"] = places()
        found["after"] = places()
        return found


def saved_beside(
    settings: dict[str, Any], before: list[TrainBatch], after: list[TrainBatch], folder: str
) -> dict[str, Any]:
    """Trains, begins a checkpoint, trains on while a thread writes it, makes it final."""
    with trainer(settings) as rank:
        for number, batch in enumerate([*before, *after]):
            if number == len(before):
                rank.begin_save(folder)
            rank.train(1, f"s{number}", f"s{number + 1}", "b", batch, number)
        early = Path(folder).exists()
        while not rank.save_written():
            time.sleep(0.01)
        rank.finish_save()
        return {"early": early, "busy": rank.status()["busy"]}


def naps(
    settings: dict[str, Any], batches: list[TrainBatch], before: list[int], cycles: int = 1
) -> dict[str, Any]:
    """Trains batches; sleeps and wakes `cycles` times before those whose numbers are in `before`.

    Returns:
        {"results", "digests": of all that is trained, around each sleep, "held": bytes that the
        trainer's tensors hold in each sleep, "left": bytes of all live tensors (awake, asleep) a
        cycle, "kept": bytes that each sleep brought to the host}.
    """
    found: dict[str, Any] = {"results": [], "digests": [], "held": [], "left": [], "kept": []}
    with trainer(settings) as rank:
        own = rank._trainer
        assert own is not None
        for number, batch in enumerate(batches):
            for _ in range(cycles if number in before else 0):
                digest, awake = own.weights_digest(), live_bytes()
                found["kept"].append(rank.sleep()["kept_bytes"])
                found["held"].append(sum(size for _, size in state_storages(own)))
                found["left"].append((awake, live_bytes()))
                assert rank.status()["asleep"]
                rank.wake()
                found["digests"].append((digest, own.weights_digest()))
            found["results"].append(
                rank.train(1, f"s{number}", f"s{number + 1}", "b", batch, number)
            )
        return found


def naps_on_rank(rank: int, port: int, settings: dict[str, Any], *args: Any) -> dict[str, Any]:
    own = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
    return naps(settings | own, *args)


def offloaded(
    settings: dict[str, Any], batches: list[TrainBatch], save: str | None, load: str | None
) -> dict[str, Any]:
    """Trains two batches, saves and sleeps between them; then the second from a checkpoint.

    Args:
        save: where the state between them is saved; None leaves both out.
        load: a state between them.

    Returns:
        {"steps": of both batches, "again": steps of the second, "host_bytes": of each role}.
    """
    with trainer(settings) as rank:

        def train(number: int) -> list[dict[str, Any]]:
            own = rank.train(1, f"s{number}", f"s{number + 1}", "b", batches[number], number)
            return own["steps"]

        own = rank._trainer
        assert own is not None
        states = [own.state] + ([own.critic.passes.state] if own.critic is not None else [])
        found: dict[str, Any] = {"host_bytes": [host_bytes(one.optimizer) for one in states]}
        if save is not None:
            first = train(0)
            rank.save(save)
            rank.sleep()
            found["steps"] = first + train(1)
        if load is not None:
            rank.load(load)
            found["again"] = train(1)
        return found


def offloaded_on_rank(rank: int, port: int, settings: dict[str, Any], *args: Any) -> dict[str, Any]:
    own = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
    return offloaded(settings | own, *args)


def host_bytes(optimizer: Any) -> int:
    """Of optimizer states on the host, which all members must keep there or none."""
    from slime_core.megatron.host_adam import HostAdam
    from slime_core.megatron.optimizer import members

    own = [member.optimizer for member in members(optimizer) if member.optimizer is not None]
    assert len({isinstance(adam, HostAdam) for adam in own}) == 1, own
    return sum(adam.host_bytes for adam in own if isinstance(adam, HostAdam))


def bits_of_host_adam() -> dict[str, Any]:
    """On a GPU: whether AdamW has the same bits with its states on the host, and the bytes that
    each takes between steps, above what parameters and gradients take."""
    import torch

    from slime_core.megatron.host_adam import HostAdam

    device, sizes = torch.device("cuda"), (3_000_001, 70, 5_000)
    found: dict[str, Any] = {}
    values: dict[str, list[torch.Tensor]] = {}
    for name in ("device", "host"):
        draw = torch.Generator(device).manual_seed(0)
        own = [torch.randn(size, generator=draw, device=device) for size in sizes]
        awake = torch.cuda.memory_allocated()
        adam: Any = torch.optim.AdamW(own, lr=1e-2)
        if name == "host":
            adam = HostAdam(adam, own[:1], device, part_elements=2**20)
            pinned = [adam.state[one]["exp_avg"].is_pinned() for one in own]
            found["pinned"] = pinned and own[0].is_pinned()
        for _ in range(3):
            gradients = [torch.randn(size, generator=draw, device=device) for size in sizes]
            if name == "host":
                with adam.taking_gradients():
                    for one, gradient in zip(own, gradients, strict=True):
                        one.grad = gradient
                with adam.masters_on_device():
                    adam.step()
            else:
                for one, gradient in zip(own, gradients, strict=True):
                    one.grad = gradient
                adam.step()
            adam.zero_grad()
            del gradients
        states = [adam.state[one] for one in own]
        found[name] = torch.cuda.memory_allocated() - awake
        values[name] = [
            tensor.cpu()
            for one, state in zip(own, states, strict=True)
            for tensor in (one.detach(), state["exp_avg"], state["exp_avg_sq"])
        ]
    pairs = zip(values["device"], values["host"], strict=True)
    return found | {"same": all(torch.equal(ours, theirs) for ours, theirs in pairs)}


def woken_by(settings: dict[str, Any], batch: TrainBatch, folder: str) -> dict[str, Any]:
    """What calls of a sleeping trainer give, beside what they gave before it slept."""
    tokens = [1, 2, 3, 4, 5]

    def exported(to: str) -> str:
        return rank.export_hf(f"{folder}/{to}", "v")["digest"]

    def loaded(name: str) -> str:
        return rank.load(f"{folder}/{name}")["weights_digest"]

    calls: dict[str, tuple[Any, Any]] = {
        "canary": (lambda: rank.canary(tokens), lambda: rank.canary(tokens)),
        "export_hf": (lambda: exported("a"), lambda: exported("b")),
        "load": (lambda: loaded("saved"), lambda: loaded("saved")),
        "named_hf_tensors": (lambda: sums(rank), lambda: sums(rank)),
    }
    with trainer(settings) as rank:
        rank.train(1, "s0", "s1", "b", batch, 0)
        rank.save(f"{folder}/saved")
        found: dict[str, Any] = {}
        for name, (before, after) in calls.items():
            awake = before()
            rank.sleep()
            found[name] = (awake, after(), rank.status()["asleep"])
        rank.sleep()
        rank.save(f"{folder}/asleep")
        rank.train(1, "s1", "s2", "b", batch, 1)
        trained = rank._trainer.weights_digest()  # type: ignore[union-attr]
        rank.load(f"{folder}/asleep")
        rank.train(1, "s1", "s2", "b", batch, 1)
        found["save"] = (trained, rank._trainer.weights_digest(), False)  # type: ignore[union-attr]
        return found


def sleeps_in_a_save(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """A checkpoint from copies is finished in sleep; one from the weights themselves forbids it."""
    with trainer(settings) as rank:
        rank.begin_save(f"{folder}/beside")
        rank.sleep()
        rank.finish_save()
        found: dict[str, Any] = {"asleep": rank.status()["asleep"]}
        before = rank.load(f"{folder}/beside")["weights_digest"]
        rank.begin_save(f"{folder}/read", beside=False)
        try:
            rank.sleep()
            found["error"] = ""
        except TrainerError as error:
            found["error"] = str(error)
        rank.finish_save()
        status = rank.status()
        found["status"] = (status["asleep"], status["tainted"])
        found["digests"] = (before, rank.load(f"{folder}/read")["weights_digest"])
        return found


def sleeps_without_room(settings: dict[str, Any]) -> str:
    """What is said where the host has no memory for the weights."""
    import torch

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    with trainer(settings) as rank:
        real, torch.empty = torch.empty, refuse
        try:
            rank.sleep()
        except TrainerError as error:
            return str(error)
        finally:
            torch.empty = real
    return ""


def sums(rank: Any) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in rank.named_hf_tensors()}


def state_storages(own: Any) -> list[tuple[int, int]]:
    """(Address, bytes) of what a trainer holds on its device to train: each storage once."""
    states = [own.state] + ([own.critic.passes.state] if own.critic is not None else [])
    tensors: list[Any] = []
    for state in states:
        for chunk in state.chunks:
            tensors += [*chunk.module.parameters(), *chunk.module.buffers()]
            tensors += [p.main_grad for p in chunk.module.parameters() if p.requires_grad]
            tensors += [p.grad for p in chunk.module.parameters() if p.grad is not None]
        for optimizer in getattr(state.optimizer, "chained_optimizers", [state.optimizer]):
            for values in optimizer.optimizer.state.values():
                tensors += [v for v in values.values() if hasattr(v, "untyped_storage")]
        for group in state.optimizer.param_groups:
            tensors += group["params"] + [p.grad for p in group["params"] if p.grad is not None]
    place = next(own.state.model.parameters()).device.type  # Adam counts its steps on the host
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == place]
    found = {storage._cdata: storage for storage in storages}
    return [(address, storage.nbytes()) for address, storage in found.items()]


def live_bytes() -> int:
    """Bytes of all tensors that Python still knows, each storage once."""
    import torch

    gc.collect()
    tensors = [
        item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)
    ]
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())

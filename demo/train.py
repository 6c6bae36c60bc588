"""Trains the built-in demo's networks from scratch on pictures that `shapes.py` draws.

    python demo/train.py text --steps 1500      the text encoder
    python demo/train.py base --steps 5000      the transformer; needs text
    python demo/train.py outlines --steps 500   a fine-tune of the transformer; needs base; also pastel and pencil

Every command goes on where it stopped, and leaves its state in `demo/.training`. Two workers of one thread each
compute gradients, and whichever is ready first counts: a busy machine makes the training slower and its last bits
other ones, nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import Any

import torch
import torch.multiprocessing as mp

import tasks
from tasks import FOLDER, SEED, TASKS

Parameters = dict[str, torch.nn.Parameter]


def trained(modules: tasks.Modules) -> Parameters:
    return {
        f"{name}.{key}": parameter
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def split(flat: torch.Tensor, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Views of a flat tensor in the parameters' shapes."""
    parts, start = [], 0
    for parameter in parameters:
        parts.append(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()
    return parts


# Workers


def gradients(task: str, number: int, step: Any, shared: torch.Tensor, mailbox: torch.Tensor, full: Any) -> None:
    """A worker: gradients of one microbatch after the other, each at the newest weights.

    Args:
        task: what is trained.
        number: of this worker; with the step it decides the random numbers.
        step: shared number of steps done.
        shared: the newest weights, flat.
        mailbox: for a gradient, flat, and the loss after it.
        full: shared flag, 1 while the mailbox waits to be emptied.
    """
    torch.set_num_threads(1)
    parent = os.getppid()
    modules = TASKS[task].modules()
    parameters = list(trained(modules).values())
    loss_of = TASKS[task].loss(modules)
    count = 0
    while os.getppid() == parent:
        rng = random.Random(f"{SEED} {task} {number} {step.value} {count}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        for parameter, values in zip(parameters, split(shared, parameters), strict=True):
            parameter.data.copy_(values)
        loss = loss_of(rng, generator)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        while full.value and os.getppid() == parent:
            time.sleep(0.002)
        for values, gradient in zip(split(mailbox, parameters), found, strict=True):
            values.zero_() if gradient is None else values.copy_(gradient)
        mailbox[-1] = loss.item()
        full.value = 1
        count += 1


class Pool:
    """Workers, each with a mailbox for one gradient."""

    def __init__(self, task: str, workers: int, shared: torch.Tensor, start: int) -> None:
        context = mp.get_context("spawn")
        self.step = context.Value("q", start)
        self.mailboxes = [torch.zeros(shared.numel() + 1).share_memory_() for _ in range(workers)]
        self.full = [context.Value("i", 0, lock=False) for _ in range(workers)]
        self.counts = [0] * workers
        self.loss = 0.0
        boxes = enumerate(zip(self.mailboxes, self.full, strict=True))
        self.processes = [
            context.Process(target=gradients, args=(task, i, self.step, shared, *both), daemon=True)
            for i, both in boxes
        ]
        for process in self.processes:
            process.start()

    def collect(self, parameters: list[torch.nn.Parameter], wanted: int) -> float:
        """Put the mean of `wanted` gradients into the parameters, and return the running mean of the loss."""
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        got = 0
        while got < wanted:
            ready = [i for i, full in enumerate(self.full) if full.value][: wanted - got]
            for i in ready:
                for parameter, values in zip(parameters, split(self.mailboxes[i], parameters), strict=True):
                    assert parameter.grad is not None
                    parameter.grad.add_(values, alpha=1 / wanted)
                self.counts[i] += 1
                self.loss += (float(self.mailboxes[i][-1]) - self.loss) * max(0.01, 1 / sum(self.counts))
                self.full[i].value = 0
            got += len(ready)
            if not ready:
                time.sleep(0.002)
            if not all(process.is_alive() for process in self.processes):
                raise RuntimeError("a worker ended")
        return self.loss

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()


# The loop


INNER = (".attention.to_", ".feed_forward.", ".self_attn.", ".mlp.")


def is_inner(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether Muon trains it: matrices inside transformer blocks."""
    return parameter.ndim == 2 and "t_embedder" not in name and any(part in name for part in INNER)


def make_optimizers(
    inner: list[torch.nn.Parameter], rest: list[torch.nn.Parameter], rates: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    """Muon for inner matrices, if there are any, and AdamW for the rest."""
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, rates[1], betas=(0.9, 0.99), weight_decay=0.0)]
    if inner:
        muon = torch.optim.Muon(inner, rates[0], weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    return optimizers


def rate(step: int, steps: int) -> float:
    """Share of the full learning rate: up over 100 steps, down to zero over the last 40 %."""
    return min(1.0, (step + 1) / 100, max(0.0, (steps - step) / (0.4 * steps)))


class Run:
    """A training that can be stopped and gone on with: weights, their running average, the optimizers' state."""

    def __init__(self, name: str, share: float = 1.0) -> None:
        self.name = name
        self.share = share
        self.task = TASKS[name]
        self.parameters = trained(self.task.modules())
        inner = [parameter for name, parameter in self.parameters.items() if is_inner(name, parameter)]
        rest = [parameter for name, parameter in self.parameters.items() if not is_inner(name, parameter)]
        self.optimizers = make_optimizers(inner, rest, self.task.rates)
        self.average = {key: parameter.detach().clone() for key, parameter in self.parameters.items()}
        self.step = 0
        self.seconds = 0.0
        if self.path.exists():
            self._restore(torch.load(self.path))

    @property
    def path(self) -> Any:
        return FOLDER / f"{self.name}.pt"

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self.seconds, self.average = state["step"], state["seconds"], state["average"]
        for key, parameter in self.parameters.items():
            parameter.data.copy_(state["weights"][key])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def save(self) -> None:
        weights = {key: parameter.detach() for key, parameter in self.parameters.items()}
        state = {"step": self.step, "seconds": self.seconds, "average": self.average, "weights": weights}
        tasks.save({**state, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}, self.path)

    def update(self, steps: int) -> None:
        """One step of the optimizers with the gradients that are there."""
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimizer, full in zip(self.optimizers, self.task.rates[::-1], strict=False):
            optimizer.param_groups[0]["lr"] = full * self.share * rate(self.step, steps)
            optimizer.step()
        decay = min(self.task.decay, (1 + self.step) / (10 + self.step))
        for key, parameter in self.parameters.items():
            self.average[key].lerp_(parameter.detach(), 1 - decay)
        self.step += 1


def train(name: str, steps: int, workers: int, share: float = 1.0) -> None:
    torch.set_num_threads(1)
    tasks.get_latents()
    run = Run(name, share)
    parameters = list(run.parameters.values())
    shared = torch.cat([parameter.detach().flatten() for parameter in parameters]).share_memory_()
    pool = Pool(name, workers, shared, run.step)
    try:
        last = saved = time.monotonic()
        while run.step < steps:
            pool.step.value = run.step
            loss = pool.collect(parameters, run.task.microbatches)
            run.update(steps)
            for values, parameter in zip(split(shared, parameters), parameters, strict=True):
                values.copy_(parameter.detach())
            now = time.monotonic()
            run.seconds, last = run.seconds + now - last, now
            if run.step % 20 == 0:
                report(run, loss, pool.counts)
            if now - saved > 120 or run.step == steps:
                saved = now
                run.save()
    finally:
        pool.stop()


def report(run: Run, loss: float, counts: list[int]) -> None:
    line = json.dumps({"step": run.step, "loss": round(loss, 4), "seconds": round(run.seconds), "microbatches": counts})
    with (FOLDER / f"{run.name}.log").open("a", encoding="utf-8") as log:
        log.write(line + "\n")
    print(line, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    share = "share of the task's learning rates: 0.25 where a training that came to rest goes on"
    parser.add_argument("--rate", type=float, default=1.0, help=share)
    parsed = parser.parse_args(arguments)
    train(parsed.task, parsed.steps, parsed.workers, parsed.rate)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`Trainer`: goes through the epochs from wherever it stands, and stops for a signal or for divergence."""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn

from opnorm.certify import Certificate, certify
from opnorm.lab import checkpoint
from opnorm.lab.data import Data, derived
from opnorm.lab.train_config import Train
from opnorm.lab.train_model import Network, Standardize, build_optimizer, learning_rate
from opnorm.lab.train_parallel import Team, finite, gathered, load_states, states

TEST_BATCH = 500
MEASURED = 0.05  # the part of the time that norms and certificates during training may take
LOOK = 0.25  # seconds between two looks at the loss on a GPU, or in all processes, each of which waits for them
SAME = 1.0  # seconds in which a second signal is the same one: torchrun hands on what its processes have had already
CHANCE = 3.0  # standard deviations above the accuracy of chance that still count as chance

Record = dict[str, Any]


class Diverged(Exception):
    """Training cannot get anywhere any more; the message says why."""


class Interrupted(Exception):
    """A signal has come, and everything is saved."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Progress:
    """Where a run stands: all that a checkpoint holds beside tensors.

    Attributes:
        epoch, batch: what is next.
        step: how many optimizer steps have been made.
        seconds, normalizing, measuring: time spent, in all, in the Normalizer, and for norms and certificates.
        loss, right, seen: sums over the epoch so far.
        at_chance: for how many epochs the test accuracy has been that of chance.
        history: a record for each epoch.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    normalizing: float = 0.0
    measuring: float = 0.0
    loss: float = 0.0
    right: int = 0
    seen: int = 0
    at_chance: int = 0
    history: list[Record] = field(default_factory=list)


class Watcher(Protocol):
    """Who is told how a run goes."""

    def stepped(self, progress: Progress, images: int) -> None:
        """A batch of `images` is done; `progress` may lag behind on a GPU, or with several processes."""
        ...

    def evaluated(self, record: Record) -> None:
        """An epoch is done."""
        ...

    def warn(self, message: str) -> None:
        """Something went wrong, and training goes on."""
        ...


class Signals:
    """SIGINT and SIGTERM are remembered while this is entered; a second Ctrl-C, a second later, interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._when = number, time.monotonic()
        elif time.monotonic() - self._when > SAME:
            raise KeyboardInterrupt


class Trainer:
    """One run, or what one of several processes does of it.

    Args:
        config: its settings.
        data: on the device where it is held in memory.
        network: the model and its Normalizer.
        fabric: where and in which precision to compute, launched.
        path: of the checkpoint.
        watcher: who is told how it goes.
    """

    def __init__(self, config: Train, data: Data, network: Network, fabric: Fabric, path: Path, watcher: Watcher):
        self.config, self.data, self.network, self.fabric, self.path = config, data, network, fabric, path
        self.watcher, self.progress, self.signals, self.team = watcher, Progress(), Signals(), Team(fabric)
        self.steps = data.steps(config.batch_size)
        self.model = fabric.setup_module(network.model, move_to_device=False)
        self.inner = build_optimizer(config, network)  # of the parameters that sharding leaves
        self.optimizer: Any = fabric.setup_optimizers(self.inner)
        self.inner.register_step_post_hook(self._normalize)
        self._sums = torch.zeros(3, dtype=torch.float64, device=_counting_device(fabric.device))
        self._waits = fabric.device.type != "cpu" or self.team.share.ranks > 1
        if not self.team.first:
            self._draw_differently()
        self._looked = self._saved = time.monotonic()

    def train(self) -> None:
        """Go on to the last epoch; raises `Diverged` or `Interrupted`."""
        with self.signals:
            self._saved = time.monotonic()
            while self.progress.epoch < self.config.epochs:
                self._epoch()
            self.save()
            (number,) = self.team.largest(self.signals.received or 0)  # one that came since the last pause
            if number:
                raise Interrupted(number)

    def save(self) -> None:
        """Write the checkpoint; where the disk is full, the last one stays, and training goes on."""
        self._collect()
        content = self._state()
        if self.team.first:
            try:
                checkpoint.save(self.path, content)
            except OSError as error:
                self.watcher.warn(f"the checkpoint could not be written: {error}; the last one is kept")
        self._saved = time.monotonic()

    def restore(self) -> None:
        """Go back to where the checkpoint was made, by whatever number of processes."""
        content = checkpoint.load(self.path)
        load_states(self.network.model, self.inner, content)
        self.fabric.strategy.precision.load_state_dict(content["precision"])
        self.progress = Progress(**content["progress"])
        random_states = [content["random"], *content.get("random_of_others", ())]
        if self.team.share.rank < len(random_states):
            checkpoint.set_random_state(random_states[self.team.share.rank])
        else:
            self._draw_differently()

    def steps_of_epoch(self) -> Iterator[None]:
        """Take the steps that are left of the epoch, one whenever the next item is asked for."""
        progress, config, share = self.progress, self.config, self.team.share
        self.model.train()
        batches = self.data.training_batches(
            progress.epoch, config.batch_size, config.seed, self.fabric.device, start=progress.batch,
            workers=config.workers, share=share,
        )  # fmt: skip
        started = time.monotonic()
        for x, y in batches:
            self._step(x, y, min(config.batch_size, len(self.data.train.labels) - progress.batch * config.batch_size))
            now = time.monotonic()
            progress.seconds, started = progress.seconds + now - started, now
            self._pause()
            yield

    def _state(self) -> dict[str, Any]:
        first, *others = self.team.everyones(checkpoint.random_state())
        return states(self.network.model, self.inner) | {
            "precision": self.fabric.strategy.precision.state_dict(),
            "progress": asdict(self.progress),
            "random": first,
            "random_of_others": others,
        }

    def _draw_differently(self) -> None:
        """Other random numbers than the first process, for dropout: it has other images."""
        seed = derived(self.config.seed, "process", self.team.share.rank, self.progress.step)
        torch.manual_seed(seed)
        random.seed(seed)

    def _epoch(self) -> None:
        progress = self.progress
        for _ in self.steps_of_epoch():
            pass
        started = time.monotonic()
        self._collect()
        self._refuse_divergence()
        record = self._record()
        progress.history.append(record)
        progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.loss, progress.right, progress.seen = 0.0, 0, 0
        progress.seconds += time.monotonic() - started
        self.watcher.evaluated(record)
        self._refuse_chance(record)
        self._pause()

    def _step(self, x: Tensor, y: Tensor, n: int) -> None:
        """A step on this process's share, x and y, of a batch of n images."""
        config, progress, share = self.config, self.progress, self.team.share
        own = share.count(n)
        rate = learning_rate(config, progress.step, self.steps)
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        logits = self.model(x).float()
        loss = F.cross_entropy(logits * config.logit_scale, y)
        if not self._waits and not math.isfinite(loss.item()):
            raise Diverged(f"the loss is {loss.item()} in step {progress.step + 1}")
        weight = own * share.ranks / n  # gradients are averaged over processes, whose shares may differ by an image
        self.fabric.backward(loss if weight == 1 else loss * weight)
        self._update()
        with torch.no_grad():
            right = (logits[:own].argmax(1) == y[:own]).sum()
            self._sums += torch.stack([loss.detach() * own, right, torch.full_like(right, own)]).to(self._sums)
        progress.step, progress.batch = progress.step + 1, progress.batch + 1
        if not self._waits:
            self._collect()
            self._refuse_divergence()
        self.watcher.stepped(progress, n)

    def _update(self) -> None:
        try:
            self.optimizer.step()
        except ValueError as error:  # from the Normalizer, which finds weights without a norm
            if not self.team.largest(not finite(self.network.model))[0]:
                raise
            raise Diverged(f"weights are NaN or infinite after step {self.progress.step + 1}: {error}") from error

    def _normalize(self, *_: Any) -> None:
        if self.network.normalizer is not None:
            started = time.perf_counter()
            self.network.normalizer.step()
            self.progress.normalizing += time.perf_counter() - started

    def _collect(self) -> None:
        """Add the sums that lie on the devices to those of the epoch."""
        loss, right, seen = self.team.total(self._sums).tolist()
        self._sums.zero_()
        self.progress.loss += loss
        self.progress.right += int(right)
        self.progress.seen += int(seen)
        self._looked = time.monotonic()

    def _pause(self) -> None:
        """Between two steps, all processes at once: look where it is time, save where it is, stop for a signal."""
        now = time.monotonic()
        due = self._waits and now - self._looked > LOOK, now - self._saved >= self.config.checkpoint_every
        look, save, number = self.team.largest(*due, self.signals.received or 0)
        if look:
            self._collect()
            self._refuse_divergence()
        if save or number:
            self.save()
        if number:
            raise Interrupted(number)

    def _record(self) -> Record:
        progress = self.progress
        test_loss, test_accuracy = self._tested()
        record = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "lr": learning_rate(self.config, progress.step - 1, self.steps),
            "train_loss": progress.loss / max(1, progress.seen),
            "train_accuracy": progress.right / max(1, progress.seen),
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "scales": self.network.scales(),
            "seconds": progress.seconds,
            "normalizing_seconds": progress.normalizing,
        }
        return record | self._measured()

    @torch.no_grad()
    def _tested(self) -> tuple[float, float]:
        """Loss and accuracy on the test images, of which each process takes its share."""
        share, total, device = self.team.share, len(self.data.test.labels), self.fabric.device
        sums, size = torch.zeros_like(self._sums), TEST_BATCH * share.ranks
        self.model.eval()
        batches = self.data.test_batches(size, device, workers=self.config.workers, share=share)
        for start, (x, y) in zip(range(0, total, size), batches, strict=True):
            own = share.count(min(size, total - start))
            logits, labels = self.model(x)[:own].float(), y[:own]
            loss = F.cross_entropy(logits * self.config.logit_scale, labels, reduction="sum")
            right = (logits.argmax(1) == labels).sum()
            sums += torch.stack([loss, right, torch.full_like(right, own)]).to(sums)
        self.model.train()
        loss_sum, right_sum, seen = self.team.total(sums).tolist()
        return loss_sum / seen, right_sum / seen

    def _measured(self) -> Record:
        """Norms and the bound of the network, where they have not taken more than their part of the time."""
        progress, started = self.progress, time.monotonic()
        rarely = progress.measuring > MEASURED * progress.seconds and progress.epoch + 1 < self.config.epochs
        (due,) = self.team.largest(self.team.first and not rarely)
        if not due:
            return {}
        with gathered(self.network.model):
            found = self._bounds() if self.team.first else {}
        progress.measuring += time.monotonic() - started
        return found

    def _bounds(self) -> Record:
        state = checkpoint.random_state()
        found: Record = {}
        try:
            if self.network.normalizer is not None:
                found["norms"] = {name: float(bound) for name, bound in self.network.normalizer.norms().items()}
            found["bound"] = certificate_of(self.network.plain(), self.data).bound
        except ValueError as error:  # an operation without a rule, which says nothing of the training
            found["no_bound"] = reason_of(error)
        finally:
            checkpoint.set_random_state(state)
        return found

    def _refuse_divergence(self) -> None:
        if not math.isfinite(self.progress.loss):
            raise Diverged(f"the loss became {self.progress.loss} before step {self.progress.step + 1}")

    def _refuse_chance(self, record: Record) -> None:
        """Stop a network that has not been better than chance for many epochs."""
        progress, n = self.progress, len(self.data.test.labels)
        chance = float(self.data.test.labels.bincount().max()) / n
        threshold = chance + CHANCE * math.sqrt(chance * (1 - chance) / n)
        progress.at_chance = progress.at_chance + 1 if record["test_accuracy"] <= threshold else 0
        if self.config.patience and progress.at_chance >= self.config.patience and progress.epoch < self.config.epochs:
            accuracy = f"{record['test_accuracy']:.2%}"
            raise Diverged(f"for {progress.at_chance} epochs the test accuracy has been that of chance, {accuracy}")


@torch.no_grad()
def logits_of(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(n, classes) and (n,): the logits and labels of all images, on the CPU."""
    found = [(model(x).float().cpu(), y.cpu()) for x, y in batches]
    logits, labels = zip(*found, strict=True)
    return torch.cat(logits), torch.cat(labels)


def certificate_of(plain: nn.Module, data: Data) -> Certificate:
    """A bound for the network with its standardization, and so for images whose pixels go from 0 to 1."""
    device = next(plain.parameters()).device
    pixels = Standardize(data.mean, data.std).to(device)
    return certify(nn.Sequential(OrderedDict(pixels=pixels, network=plain)), data.shape, lower=False)


def reason_of(error: ValueError) -> str:
    """In one line why there is no certificate: how many operations have none, and the first of them."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2])


def _counting_device(device: torch.device) -> torch.device:
    """Where sums in float64 can be kept: not on MPS, which has none."""
    return torch.device("cpu") if device.type == "mps" else device

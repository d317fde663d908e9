"""`Train`: every setting of a training run, its presets, and which of them go together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from opnorm.lab.cli import UsageError, parse

PROGRAM = "opnorm train"


@dataclass(frozen=True)
class Train:
    """Train a network whose layers have the norms that you set, and certify it.

    For example:
      opnorm train
      opnorm train --preset paper-cifar10 --data-path cifar-10-batches-bin --K 5 --scaling hard --lr 1e-2
      opnorm train --resume runs/NAME
    """

    preset: Literal["digits", "paper-cifar10", "paper-imagenet"] = "digits"
    """What the other options are by default: the embedded digits, or the tables in appendix B of the paper."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "ds_convnet"
    """A built-in name, or package.module:factory, or file.py:factory."""

    arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An argument of the model's factory, such as width=32. May be repeated. Built-in models get the number of classes
    and the size of the images by themselves."""

    data: Literal["digits", "cifar10", "fashion-mnist", "imagenet", "folder"] = "digits"
    """The data set; `folder` is any folder of images, one folder a class."""

    data_path: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Where it is: a folder or an archive. Without it, CIFAR-10 is downloaded."""

    image_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """For folders of images: crop to N×N pixels, 224 without this."""

    normalize: bool = True
    """Plain training: leave the layers at whatever norm they get."""

    K: Annotated[float, tyro.conf.arg(metavar="K")] = 1.0
    """The norm of each layer."""

    K_per: Literal["pair", "joint", "layer"] | None = None
    """What has norm K: a depthwise and pointwise pair, √K for each of them; the pair as one map, jointly, whose parts
    may have more; or every layer by itself. Without this: pair, where the model has such pairs, else layer."""

    scaling: Literal["hard", "soft", "cap"] = "hard"
    """hard: norm K; soft: K·tanh(s), s learned for each layer; cap: at most K."""

    s_init: float = 3.0
    """Where the s of soft scaling start."""

    eps: float = 0.01
    """The residual at which the power iteration of pointwise and linear layers stops."""

    optimizer: Literal["sgd", "adam"] = "adam"
    """The optimizer."""

    lr: float = 0.005
    """The learning rate, the largest where it changes."""

    momentum: float = 0.9
    """Of SGD."""

    weight_decay: float = 0.0
    """Of all parameters but the s of soft scaling."""

    schedule: Literal["constant", "milestones", "onecycle"] = "onecycle"
    """The learning rate: constant; a tenth from each milestone on; or up for 30 % of the run and down for the rest."""

    milestones: Annotated[tuple[int, ...], tyro.conf.arg(metavar="EPOCH")] = ()
    """Epochs after which the learning rate is divided by ten."""

    epochs: int = 60
    """How often to go through the training images."""

    batch_size: int = 64
    """Images in a step, those of all devices together."""

    logit_scale: float = 32.0
    """The loss is that of the logits times this: a network of small norm cannot make its logits large itself. It
    changes neither the classes nor the certificate."""

    patience: int = 20
    """Stop as diverged after so many epochs at the accuracy of chance; 0: never."""

    radii: Annotated[tuple[float, ...], tyro.conf.arg(metavar="R")] = (0.1, 36 / 255, 72 / 255, 108 / 255)
    """Radii of the certified accuracy: Euclidean, of images whose pixels go from 0 to 1."""

    precision: Literal["32", "bf16", "16"] = "32"
    """Of the forward pass; below 32: automatic mixed precision."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto: on a GPU where there is one."""

    devices: int = 1
    """How many devices, a process each, which share out every batch. torchrun says it itself."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """On several devices, ddp: each has all weights; fsdp: each has a part of them."""

    workers: int = 0
    """Threads that read images from files; 0: one for each core."""

    seed: int = 0
    """For weights, order and augmentation."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where to write the run. Without it: a folder in runs/, named after the settings."""

    overwrite: bool = False
    """Begin again where there is a run already."""

    resume: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Go on with the run in this folder, with its settings."""

    checkpoint_every: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 60.0
    """How often to save everything; at the end of the run and when it is interrupted it is saved too."""

    @property
    def folder(self) -> Path:
        """Where the run is written."""
        if self.resume is not None:
            return self.resume
        norms = f"K{self.K:g}-{self.scaling}" if self.normalize else "plain"
        name = (
            f"{Path(self.model.replace(':', '-')).name}-{self.data}-{norms}-{self.optimizer}{self.lr:g}-seed{self.seed}"
        )
        return self.out or Path("runs") / name

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


# Runkel et al. 2021, appendix B; K, learning rate and hard or soft are what the paper varies.
PAPER: dict[str, Any] = {
    "optimizer": "sgd", "momentum": 0.9, "schedule": "milestones", "batch_size": 128, "logit_scale": 1.0, "eps": 0.01,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {},
    "paper-cifar10": PAPER | {
        "model": "ds_resnet34", "data": "cifar10", "K": 5.0, "lr": 1e-2, "epochs": 300, "milestones": (150, 250),
    },
    "paper-imagenet": PAPER | {
        "model": "mobilenet_v2", "data": "imagenet", "K": 20.0, "lr": 5e-4, "epochs": 150, "milestones": (50, 100),
        "scaling": "soft",
    },
}  # fmt: skip
# The learning rate and the start of s for each K of the paper's ImageNet runs.
IMAGENET = {10: (1e-3, 3.0), 12: (1e-3, 3.0), 15: (1e-3, 3.0), 20: (5e-4, 3.0), 30: (5e-4, 0.5), 40: (3e-4, 0.5)}
# What may change when a run goes on: where and how fast, and not, but for rounding, what is computed.
FREE = {"resume", "device", "devices", "strategy", "workers", "checkpoint_every", "overwrite", "out", "data_path"}


def read_config(argv: Sequence[str], stored: Train | None = None) -> Train:
    """The settings from arguments, with those of the preset, or of the stored run, as defaults."""
    if stored is None:
        first = parse(Train, [a for a in argv if a not in ("-h", "--help")], PROGRAM)
        usual = preset(first.preset, first.K)
        config = parse(Train, argv, PROGRAM, default=usual)
        if config.schedule != usual.schedule and config.milestones == usual.milestones:
            config = dataclasses.replace(config, milestones=())  # the preset's belong to the preset's schedule
    else:
        config = parse(Train, argv, PROGRAM, default=stored)
        changed = [f for f, v in vars(config).items() if f not in FREE and v != getattr(stored, f)]
        if changed:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            raise UsageError(
                f"expected --resume with the settings of the run, got another {names}; begin a new run instead"
            )
    _check(config)
    return config


def preset(name: str, K: float) -> Train:
    """The defaults of a preset; the paper's ImageNet runs have a learning rate and a start of s for each K."""
    values = dict(PRESETS[name], preset=name)
    if name == "paper-imagenet" and K in IMAGENET:
        values["lr"], values["s_init"] = IMAGENET[int(K)]
    return Train(**values)


def from_dict(values: dict[str, Any]) -> Train:
    """The settings of `to_dict`; those that an older version did not have are as they are without being given."""
    odd = ", ".join(sorted({*values} - {f.name for f in dataclasses.fields(Train)}))
    if odd:
        raise UsageError(
            f"expected the settings of this version of opnorm, got others: {odd}; use the version of the run"
        )
    tuples: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    paths: dict[str, Any] = {k: Path(tuples[k]) for k in ("data_path", "out", "resume") if tuples.get(k) is not None}
    return Train(**tuples | paths)


def _check(config: Train) -> None:
    """What tyro cannot know: which numbers make sense, and which settings go together."""
    for name, least in (("epochs", 1), ("batch_size", 1), ("devices", 1), ("workers", 0), ("patience", 0), ("seed", 0)):
        if getattr(config, name) < least:
            raise UsageError(f"expected --{name.replace('_', '-')} of at least {least}, got {getattr(config, name)}")
    for name in ("K", "lr", "eps", "logit_scale"):
        if not 0 < getattr(config, name) < math.inf:
            raise UsageError(f"expected --{name.replace('_', '-')} above 0 and finite, got {getattr(config, name)}")
    for name in ("momentum", "weight_decay", "checkpoint_every"):
        if not 0 <= getattr(config, name) < math.inf:
            raise UsageError(
                f"expected --{name.replace('_', '-')} of at least 0 and finite, got {getattr(config, name)}"
            )
    if any(not 0 <= r < math.inf for r in config.radii):
        raise UsageError(f"expected --radii of at least 0 and finite, got {config.radii}")
    if config.milestones and config.schedule != "milestones":
        raise UsageError(f"expected --milestones with --schedule milestones, got them with {config.schedule}")
    if config.image_size is not None and config.image_size < 8:
        raise UsageError(f"expected --image-size of at least 8, got {config.image_size}")
    if config.K_per and not config.normalize:
        raise UsageError("expected --K-per without --no-normalize, got both; leave one of them out")

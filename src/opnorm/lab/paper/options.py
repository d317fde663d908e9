"""`Options`: what every experiment can be told, and the profiles that say how much of it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro

from opnorm.lab.cli import UsageError, parse

FREE = {"runs", "cpus_per_run", "gpus_per_run", "address"}  # where and how fast runs are computed, and not what
Profile = Literal["small", "paper"]
Profiles = Mapping[str, Mapping[str, Any]]  # what the options are in each profile


@dataclass(frozen=True)
class Options:
    """What every experiment can be told."""

    profile: Profile = "small"
    """paper: as published, for a GPU and the full data; small: what two cores can do. The other options are as the
    profile says, unless they are given."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("results")
    """Where the results are written, as JSON. What is there already stays until all of the new one is known."""

    docs: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("docs")
    """A folder with a page results.md, whose section is written and whose figure is drawn from the result; where there
    is no such page, the figure is drawn beside the result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU where there is one."""

    restart: bool = False
    """Begin again, and forget what was computed before a kill."""

    @property
    def torch_device(self) -> torch.device:
        """The device that `device` names."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("expected --device that torch sees here, got cuda; use auto or cpu")
        cuda = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return torch.device("cuda" if cuda else "cpu")


@dataclass(frozen=True)
class WithImages(Options):
    """What an experiment can be told that is done on CIFAR-10, on files of images, or on files made from CIFAR-10."""

    data_path: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Where CIFAR-10 is: a folder or an archive. What batches are there are used. Without it, it is downloaded."""

    images: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """ImageNet, or another folder with train and val, and in both one folder a class. Without it, in the small profile,
    files are made from CIFAR-10."""


def require_images(options: WithImages) -> None:
    """Refuse images that are not there, and a published result from images that are made."""
    if options.images is None and options.profile == "paper":
        raise UsageError("expected --images with a folder of images in the profile paper, got none; use ImageNet")
    if options.images is not None and not options.images.is_dir():
        raise UsageError(f"expected --images as a folder with train and val, got {options.images}, which is none")


Some = TypeVar("Some", bound=Options)


def read_options(kind: type[Some], argv: Sequence[str], program: str, profiles: Profiles) -> Some:
    """The options from arguments; what is not given is as the profile has it."""
    first = parse(kind, [a for a in argv if a not in ("-h", "--help")], program)
    return parse(kind, argv, program, default=kind(profile=first.profile, **profiles[first.profile]))


def settings_of(options: Options) -> dict[str, Any]:
    """What decides on the result: the options of the experiment itself, of files the name alone."""
    common = FREE | {field.name for field in dataclasses.fields(Options)}
    own = {name: value for name, value in vars(options).items() if name not in common}
    return {name: value.name if isinstance(value, Path) else value for name, value in own.items()}

"""`opnorm train`: trains a network with the norms that are asked for, and leaves a folder with all of the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric

from opnorm.lab import checkpoint
from opnorm.lab.cli import UsageError
from opnorm.lab.data import Data, load_data
from opnorm.lab.record import commit, environment, write_json
from opnorm.lab.resumed import resumed
from opnorm.lab.train_config import PROGRAM, Train, from_dict, read_config
from opnorm.lab.train_log import NAME, Logs
from opnorm.lab.train_loop import Diverged, Interrupted, Trainer
from opnorm.lab.train_model import Network, build_network
from opnorm.lab.train_parallel import fabric_for, gathered, launched
from opnorm.lab.train_report import FILES, PAGE, report, summary
from opnorm.lab.train_show import Screen

CONFIG, CHECKPOINT = "config.json", "checkpoint.pt"
DIVERGED = 3  # exit code


def main(argv: Sequence[str]) -> int:
    """Run `opnorm train`."""
    config = _config(argv)
    fabric = fabric_for(config)
    try:
        return _run(config, fabric, argv)
    except UsageError:
        if fabric.local_rank == 0:
            raise
        return 2  # the first process on this machine says why


def _run(config: Train, fabric: Fabric, argv: Sequence[str]) -> int:
    show = _nothing if fabric.local_rank else print
    data = load_data(config.data, config.data_path, image_size=config.image_size, show=show)
    network = build_network(config, data, fabric.device)
    try:
        if fabric.is_global_zero:
            _prepare(config, argv)
        with launched(fabric, argv):  # the other processes begin here, and find what is prepared
            return _train(config, data.to(fabric.device), network, fabric, argv)
    except OSError as error:
        print(f"{PROGRAM}: {error}; what was saved before is in {config.folder}", file=sys.stderr)
        return 1


def _train(config: Train, data: Data, network: Network, fabric: Fabric, argv: Sequence[str]) -> int:
    path, first = config.folder / CHECKPOINT, fabric.is_global_zero
    screen = Screen(config.epochs, data.steps(config.batch_size), quiet=not first)
    trainer = Trainer(config, data, network, fabric, path, screen)
    if path.is_file() and config.resume is not None:
        trainer.restore()
    screen.start = trainer.progress.step
    _introduce(screen, config, data, network, trainer)
    logs = Logs(config.folder, trainer.progress, screen) if first else None
    trainer.watcher = logs or screen
    diverged = None
    try:
        with screen:
            trainer.train()
    except Diverged as error:
        diverged = str(error)
    except Interrupted as error:
        screen.say(f"stopped by {error} in step {trainer.progress.step:,}; {PROGRAM} --resume {config.folder} goes on")
        return 128 + error.number if first else 0
    finally:
        if logs is not None:
            logs.close()
    with gathered(network.model):
        if not first:
            return 0
        result = report(config, data, network, trainer.progress, _begun(config), diverged)
    for line in [*summary(result, data), f"written to {config.folder}; the page of the run is {config.folder / PAGE}"]:
        screen.say(line)
    return DIVERGED if diverged else 0


def _config(argv: Sequence[str]) -> Train:
    """The settings; with --resume those of the run, of which only where and how fast to compute may change."""
    folder = _resumed(argv)
    if folder is None:
        return read_config(argv)
    path = folder / CONFIG
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))["config"]
    except OSError as error:
        raise UsageError(f"expected --resume with the folder of a run, got {folder} without {CONFIG}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"expected the settings of a run in {path}, got something else: {error}") from error
    return read_config(argv, from_dict(stored))


def _resumed(argv: Sequence[str]) -> Path | None:
    """What --resume says; the rest cannot be read before the settings of that run are known."""
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name == "--resume" and (equals or i + 1 < len(argv)):
            return Path(value if equals else argv[i + 1])
    return None


def _begun(config: Train) -> dict[str, Any]:
    """By what command, commit and machine the run was begun, and by which others it was gone on with.

    The command and the commit of the beginning repeat the run; those of --resume, and of its end, do not. A commit that
    the files have come to since, which is not the one that was loaded, is named too.
    """
    content = json.loads((config.folder / CONFIG).read_text(encoding="utf-8"))
    begun = {name: content[name] for name in ("environment", "resumed") if name in content}
    last, ended = [begun["environment"], *begun.get("resumed", ())][-1], commit()
    return begun if ended == last["commit"] else begun | {"ended": {"commit": ended}}


def _prepare(config: Train, argv: Sequence[str]) -> None:
    """Make the folder, and write what the run is, before anything of it exists; or by what else it goes on."""
    folder = config.folder
    for name in (CONFIG, CHECKPOINT, NAME, *FILES):
        checkpoint.remove_parts(folder / name)
    now = environment(["train", *argv], config.seed)
    if config.resume is not None:
        write_json(folder / CONFIG, resumed(json.loads((folder / CONFIG).read_text(encoding="utf-8")), now))
        return
    if (folder / CONFIG).exists() and not config.overwrite:
        raise UsageError(
            f"expected a new folder for the run, got {folder}, which holds one; --resume {folder} goes on with it, "
            "--overwrite begins again, --out FOLDER writes elsewhere"
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"expected --out as a folder, got {folder}, which is a file")
    events = folder.glob("events.out.tfevents.*")
    for old in (folder / CHECKPOINT, folder / NAME, *(folder / name for name in FILES), *events):
        old.unlink(missing_ok=True)
    write_json(folder / CONFIG, {"config": config.to_dict(), "environment": now})


def _introduce(screen: Screen, config: Train, data: Data, network: Network, trainer: Trainer) -> None:
    """Say what is about to be trained, on what, and where it is written."""
    count = sum(p.numel() for p in network.bare.parameters())
    for note in data.notes:
        screen.say(f"{data.name}: {note}")
    norms = "no normalisation"
    if network.normalizer is not None:
        layers = len(network.normalizer.layers)
        norms = f"{layers} layers, K = {config.K:g} per {network.K_per}, {config.scaling} scaling"
    where, ranks = trainer.fabric.device.type, trainer.fabric.world_size
    where = f"{ranks} {where} processes, {config.strategy}" if ranks > 1 else where
    screen.say(f"{config.model}, {count:,} parameters, {norms}; on {where}, into {config.folder}")
    if trainer.progress.step:
        screen.say(f"going on after step {trainer.progress.step:,} of {config.epochs * trainer.steps:,}")


def _nothing(text: str) -> None:
    """Show nothing."""

"""The command `opnorm`: finds a command's module, runs its `main(argv)`, and turns what goes wrong into one line.

A new command is a module with `main(argv: list[str]) -> int` and a line in `COMMANDS`. It is imported only when it
runs, so that `opnorm --help` is quick and works without the extra. It gets its options from a dataclass through
`parse`, and raises `UsageError` where a value is wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

Config = TypeVar("Config")


class Command(NamedTuple):
    """Where a command lives, and what it is for."""

    module: str
    summary: str


COMMANDS = {
    "norms": Command("opnorm.lab.norms", "the operator norm of every layer of a model"),
    "certify": Command("opnorm.lab.certify", "a bound of the Lipschitz constant of a whole network, and a report"),
    "train": Command("opnorm.lab.train", "train a network whose layers have the norms that you set, and certify it"),
    "eval": Command("opnorm.lab.eval", "accuracy, certified accuracy and certificate of a trained network, on images"),
    "export": Command("opnorm.lab.export", "a trained network as ONNX, safetensors or a plain state dict, checked"),
    "sweep": Command("opnorm.lab.sweep", "a grid of training runs, on one machine or a cluster, as table and heat map"),
    "bench": Command("opnorm.lab.bench", "measurements of this library, written as JSON"),
    "reproduce": Command("opnorm.lab.paper", "the figures and tables of Runkel et al. 2021, again, beside ours"),
}

START = """\
opnorm: the operator norm (Lipschitz constant) of the layers of a PyTorch network

Start with a built-in network, then train one on the digits that ship with scikit-learn (a minute or two):
  opnorm norms mobilenet_v2 --input 3,224,224
  opnorm train --out runs/digits
  opnorm eval runs/digits --html evaluation.html
  opnorm export runs/digits --to model.onnx

With a network of your own, whose layers and whose Lipschitz constant you want to know:
  opnorm norms my_package.my_module:build_model --input 3,32,32 --checkpoint weights.safetensors
  opnorm certify my_package.my_module:build_model --input 3,32,32 --checkpoint weights.safetensors --html report.html

Commands:
{commands}

opnorm COMMAND --help shows the options of a command and an example.
"""

# What the extras bring, by the name that is imported.
EXTRAS = {
    "lab": (
        "rich", "tyro", "safetensors", "numpy", "PIL", "sklearn", "matplotlib", "tensorboard",
        "lightning", "lightning_fabric", "onnx", "onnxscript",
    ),
    "sweep": ("ray", "yaml"),
    "bench": ("deel", "orthogonium", "normflows"),
}  # fmt: skip


class UsageError(Exception):
    """A wrong value: the message, one line that says what is allowed, is all that is shown. Exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `opnorm` with these arguments; the exit code."""
    arguments = [*sys.argv[1:]] if argv is None else [*argv]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(START.format(commands=_summaries(COMMANDS)), end="")
        return 0
    if arguments[0] == "--version":
        from opnorm import __version__

        print(f"opnorm {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        return _fail("opnorm", f"expected a command among {', '.join(COMMANDS)}, got {name!r}; see opnorm --help")
    return run(f"opnorm {name}", lambda: importlib.import_module(COMMANDS[name].module).main(rest))


def choose(argv: Sequence[str], commands: Mapping[str, Command], start: str, program: str) -> int:
    """Run the one of a command's own commands that the first argument names; without one, print `start`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(start.format(commands=_summaries(commands)), end="")
        return 0
    if argv[0] not in commands:
        raise UsageError(f"expected one of {', '.join(commands)}, got {argv[0]!r}; see {program} --help")
    return int(importlib.import_module(commands[argv[0]].module).main(argv[1:]))


def run(program: str, command: Callable[[], int]) -> int:
    """The exit code of a command, whatever it raises: 2 for a wrong value, 1 for what this machine lacks, 130 for
    Ctrl-C.
    """
    try:
        code = command()
        sys.stdout.flush()
    except UsageError as error:
        return _fail(program, str(error))
    except ModuleNotFoundError as error:
        extra = next((e for e, modules in EXTRAS.items() if (error.name or "").partition(".")[0] in modules), None)
        if extra is None:
            raise
        return _fail(program, f'{error.name} is not installed; pip install "opnorm[{extra}]"', code=1)
    except KeyboardInterrupt:
        return _fail(program, "interrupted", code=130)
    except BrokenPipeError:  # the reader of a pipe, say `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a folder that cannot be written to
        return _fail(program, str(error), code=1)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return code


def parse(config: type[Config], argv: Sequence[str], program: str, default: Config | None = None) -> Config:
    """An instance of the dataclass `config` from arguments; its fields are the options, its docstrings the help.

    What is not given is as in `default`, where there is one, else as in the class.
    """
    import tyro

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _wide(argv):
            start: Any = {} if default is None else {"default": default}
            return tyro.cli(config, args=argv, prog=program, config=(tyro.conf.FlagCreatePairsOff,), **start)
    except SystemExit as error:
        if error.code in (0, None):
            raise
        raise UsageError(f"{_one_line(errors.getvalue())}; see {program} --help") from None


@contextlib.contextmanager
def _wide(argv: Sequence[str]) -> Iterator[None]:
    """Keep error messages, which are to become one line, from being wrapped; the help is for the terminal as it is."""
    before = os.environ.get("COLUMNS")
    if not {"-h", "--help"} & {*argv}:
        os.environ["COLUMNS"] = "1000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


def _one_line(boxed: str) -> str:
    """The message in the box that tyro draws around an error, with the option's own help where that is shown too."""
    lines = [line.strip("│ ") for line in boxed.splitlines() if not line.startswith(("╭", "╰"))]
    sections = [_joined(part) for part in re.split(r"\n[─-]{9,}\n", "\n".join(lines))]
    if "│" not in boxed and len(sections) > 1:  # no frame without Unicode: the title comes first
        sections = sections[1:]
    message, more = sections[0].removesuffix("."), sections[1] if len(sections) > 1 else ""
    message = re.sub(r"\. Expected one of \((.*?)\)", lambda found: f"; expected one of {_choices(found[1])}", message)
    if more.startswith("Argument helptext:"):
        message += f"; expected {more.removeprefix('Argument helptext: ')}"
    elif more.startswith("Perhaps you meant:"):
        message += f"; perhaps you meant {more.split()[3]}"
    return message


def _choices(quoted: str) -> str:
    """`"'upper', 'None', 'exact'"`, in no order, as `"exact, upper"`: None is what leaving the option out means."""
    return ", ".join(sorted({*re.findall(r"'([^']*)'", quoted)} - {"None"}))


def _summaries(commands: Mapping[str, Command]) -> str:
    width = max(map(len, commands))
    return "\n".join(f"  {name:{width}}  {command.summary}" for name, command in commands.items())


def _joined(text: str) -> str:
    return " ".join(text.split())


def _fail(program: str, message: str, code: int = 2) -> int:
    print(f"{program}: {_joined(message)}", file=sys.stderr)
    return code


def console_width(default: int = 160) -> int | None:
    """None in a terminal, which knows its width; else COLUMNS, or wide, since a file or a pipe does not wrap."""
    return None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", default))

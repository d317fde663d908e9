"""What every section says in the same words: its claims, its command, profile and machine, numbers, tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

Result = dict[str, Any]


def caption(claims: dict[str, bool]) -> str:
    """The claims that hold, and then those that do not."""
    held = " ".join(claim for claim, holds in claims.items() if holds)
    failed = " ".join(claim for claim, holds in claims.items() if not holds)
    return f"**{held}**" * bool(held) + f" *What does not hold here: {failed}*" * bool(failed)


def command(result: Result) -> str:
    """The command that makes the result again, without where it was written, and with the names of files alone."""
    words = shlex.split(result["environment"]["command"])
    kept = [w for i, w in enumerate(words) if not {w, words[i - 1]} & {"--out", "--docs", "--restart"}]
    return f"`{shlex.join(PurePath(word).name if '/' in word else word for word in kept)}`"


def origin(result: Result) -> str:
    """The profile and the machine."""
    environments = [result["environment"], *result.get("resumed", ())]
    machines = dict.fromkeys(
        f"{e['gpu'] or e['processor']}, {e['cores']} cores, torch {e['torch'].partition('+')[0]}" for e in environments
    )
    changed = f" with other {', '.join(result['changes'])}" if result["changes"] else ""
    return f"Profile {result['profile']}{changed}; {' and '.join(machines)}."


def percent(value: float, digits: int = 2) -> str:
    """0.0123 as "1.23 %"; what rounds to zero has no sign."""
    return f"{100 * value:z.{digits}f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))

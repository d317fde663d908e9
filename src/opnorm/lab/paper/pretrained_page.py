"""What docs/results.md says of `opnorm reproduce pretrained`: claims, section and figure, functions of its JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.prose import caption, command, origin, percent, table

Result = dict[str, Any]
Cell = dict[str, Any]
ROUNDING = 1e-6  # of values in float32
BOUNDS = ("upper", "exact")  # the guarantees of a bound
FLOOR, BELOW = 1e-6, 2e-7  # where exact values are drawn, and what is no bound
PAPER, EXACT = "Runkel2021", "Exact"
PUBLISHED = {"stride 1": "2.80 % ± 1.55 %", "stride 2": "75.6 % ± 20.6 %"}  # section 4.1, for MobileNetV2 alone
NEAR = {"stride 1": (0.0280, 0.0155), "stride 2": (0.756, 0.206)}
STYLES = {  # colour, marker, whether it is filled, and its size; drawn in this order
    EXACT: ("black", "_", True, 9),
    PAPER: ("#b3541e", "s", True, 6),
    "FourierBound": ("#2b6cb0", "o", True, 5),
    "auto": ("#2f855a", "D", False, 9),
}
OTHERS = "v^<>pPhX*d1"  # markers of the other methods
Groups = dict[str, list[Cell]]


def groups(result: Result) -> Groups:
    """The layers of each stride."""
    found: Groups = {}
    for cell in result["cells"].values():
        found.setdefault(f"stride {_sizes(cell['stride'])}", []).append(cell)
    return dict(sorted(found.items()))


def averages(cells: Iterable[Cell], method: str) -> dict[str, float] | None:
    """Mean, standard deviation and extremes of a method over the layers, if it takes all of them."""
    values = [float(cell["over"].get(method, "nan")) for cell in cells]
    if any(value != value for value in values):
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation, "least": min(values), "largest": max(values)}


def pretrained_claims(result: Result) -> dict[str, bool]:
    """What the layers show, and whether they do."""
    cells = [*result["cells"].values()]
    claims = {
        "On every layer `FourierBound` is nearer to the norm than the paper's bound, and `auto` is no further from it "
        "than `FourierBound`.": all(
            c["over"]["auto"] - ROUNDING <= c["over"]["FourierBound"] < c["over"][PAPER] for c in cells
        ),
        "No value that is guaranteed to be a bound lies below the norm.": all(
            over >= -ROUNDING for c in cells for name, over in c["over"].items() if c["guarantee"][name] in BOUNDS
        ),
        "On average, no published method that stays above the norm is nearer to it than `auto`.": all(
            found["least"] < -ROUNDING or found["mean"] >= _mean(some, "auto") - ROUNDING
            for some in groups(result).values()
            for name in _published(result)
            if (found := averages(some, name)) is not None
        ),
    }
    if _is_of_the_paper(result):
        claims["The averages of the paper's bound are those that the paper reports, within its standard deviation."] = (
            all(abs(_mean(some, PAPER) - NEAR[name][0]) <= NEAR[name][1] for name, some in groups(result).items())
        )
    return claims


def pretrained(result: Result) -> str:
    """Section 4.1: averages of every method, and the layers one by one."""
    settings, parts, names = result["settings"], groups(result), methods(result)
    head = ["overestimation", "guarantee"]
    for name, cells in parts.items():
        layers = "1 layer" if len(cells) == 1 else f"{len(cells)} layers"
        head += [f"{layers} of {name}: mean ± σ", "least to largest"]
    rows = [[_title(name), _guarantees(result, name), *_entries(parts, name)] for name in names]
    if _is_of_the_paper(result):
        rows.insert(0, ["the paper, as published", "", *(x for name in parts for x in (PUBLISHED[name], ""))])
    layers = table(
        ("layer", "pixels", "stride", "norm", *names),
        (
            (f"`{layer}`", _sizes(c["input"]), _sizes(c["stride"]), f"{c['norm']:.4f}", *(_over(c, n) for n in names))
            for layer, c in result["cells"].items()
        ),
    )
    indented = "\n".join(f"    {line}" for line in layers.splitlines())
    return f"""
## Trained kernels: section 4.1

{command(result)}: the {len(result["cells"])} depthwise layers of `{settings["model"]}` on images of
{settings["input"].replace(",", "×")}, weights `{settings["weights"]}`. By how much a value exceeds the norm, which
`Exact` finds in double precision; what is negative lies below it. {origin(result)}

![Overestimation of each layer, on a logarithmic axis](img/results/pretrained.svg)

{caption(pretrained_claims(result))}

{table(head, rows)}

σ is the standard deviation over the layers. {_spread(result)}Methods that keep a vector from one training step to the
next were called 50 times. A value without guarantee that lies above these norms may lie below others.

{NOISE["pretrained"]}

??? note "Layer by layer"

{indented}
"""


def _spread(result: Result) -> str:
    """Where the standard deviation of the paper's bound, which is not the published one, comes from."""
    if not _is_of_the_paper(result):
        return ""
    plain = groups(result)["stride 1"]
    smallest = min(cell["input"] for cell in plain)
    over = [float(cell["over"][PAPER]) for cell in plain if cell["input"] == smallest]
    return (
        f"Of the paper's bound at stride 1 it is larger here than published: on the {len(over)} layers of "
        f"{_sizes(smallest)} pixels alone that bound is {percent(min(over))} to {percent(max(over))} too large. The "
        "paper does not say which weights it used, nor how it found their norms. "
    )


def figure(result: Result) -> Figure:
    """A mark for each layer and method, the paper's and ours joined by lines; what is below the norm, at the bottom."""
    drawn = Figure(figsize=(10, 5.4), layout="constrained")
    axes = drawn.subplots()
    parts = groups(result)
    cells = [cell for some in parts.values() for cell in some]
    others = [name for name in methods(result) if name not in STYLES]
    for name in (*others, *(name for name in STYLES if name in methods(result))):
        _marks(axes, parts, name, others)
    axes.set(yscale="log", ylabel="overestimation of the norm", xlabel="pixels of the input along each side")
    axes.set_ylim(BELOW / 1.8, None)
    axes.axhspan(BELOW / 1.8, BELOW * 2.2, color="#c53030", alpha=0.08, linewidth=0)
    highest = axes.get_ylim()[1]
    names = {BELOW: "below the norm", FLOOR: "exact"}
    ticks = [BELOW, *(10.0**k for k in range(-6, 4) if 10.0**k <= highest)]
    axes.set_yticks(ticks, [names.get(tick) or f"{100 * tick:g} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(len(cells)), [_sizes(cell["input"]) for cell in cells])
    start = 0
    for name, some in parts.items():
        axes.text(start - 0.4, 1.015, name, transform=axes.get_xaxis_transform())
        start += len(some)
        axes.axvline(start - 0.5, color="black", linewidth=0.8)
    axes.set_xlim(-0.5, len(cells) - 0.5)
    axes.grid(alpha=0.3)
    drawn.legend(loc="outside right upper", fontsize=8, frameon=False, reverse=True)
    return drawn


def _marks(axes: Axes, parts: Groups, name: str, others: list[str]) -> None:
    places: list[float] = []
    heights: list[float] = []
    start = 0
    for cells in parts.values():
        over = [float(cell["over"].get(name, "nan")) for cell in cells]
        places += [*range(start, start + len(over)), math.nan]  # a gap between strides, which no line crosses
        heights += [*(BELOW if value < -ROUNDING else max(value, FLOOR) for value in over), math.nan]
        start += len(over)
    if name in STYLES:
        colour, marker, filled, size = STYLES[name]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": size, "linewidth": 1.2, "zorder": 3}
        look |= {"markerfacecolor": colour if filled else "none", "linestyle": "none" if name == EXACT else "-"}
    else:
        number = others.index(name)
        look = {"color": f"C{number % 10}", "marker": OTHERS[number % len(OTHERS)], "markersize": 5, "alpha": 0.55}
        look |= {"linestyle": "none", "markerfacecolor": "none"}
    axes.plot(places, heights, label=name, clip_on=False, **look)


def methods(result: Result) -> list[str]:
    """The methods that take some of the layers."""
    return [name for name in result["families"] if any(name in cell["over"] for cell in result["cells"].values())]


def _mean(cells: list[Cell], method: str) -> float:
    return statistics.fmean(float(cell["over"][method]) for cell in cells)


def _published(result: Result) -> list[str]:
    """The published methods but for those that approach the norm from below."""
    below = {name for cell in result["cells"].values() for name, kind in cell["guarantee"].items() if kind == "lower"}
    return [name for name, family in result["families"].items() if family == "published" and name not in below]


def _is_of_the_paper(result: Result) -> bool:
    """Whether this is the network of section 4.1: 17 layers, 4 of them of stride 2."""
    counts = {name: len(cells) for name, cells in groups(result).items()}
    settings = result["settings"]
    return (settings["model"], settings["input"]) == ("mobilenet_v2", "3,224,224") and counts == {
        "stride 1": 13,
        "stride 2": 4,
    }


def _entries(parts: Groups, name: str) -> list[str]:
    entries = []
    for cells in parts.values():
        found = averages(cells, name)
        if found is None:
            entries += ["", ""]
            continue
        entries.append(f"{percent(found['mean'])} ± {percent(found['deviation'])}")
        entries.append(f"{percent(found['least'])} to {percent(found['largest'])}")
    return entries


def _guarantees(result: Result, name: str) -> str:
    found = dict.fromkeys(c["guarantee"][name] for c in result["cells"].values() if name in c["guarantee"])
    return ", ".join(found)


def _title(name: str) -> str:
    return f"the paper, `{name}`" if name == PAPER else f"`{name}`"


def _over(cell: Cell, name: str) -> str:
    return percent(float(cell["over"][name])) if name in cell["over"] else ""


def _sizes(sizes: list[int]) -> str:
    return str(sizes[0]) if len({*sizes}) == 1 else "×".join(map(str, sizes))

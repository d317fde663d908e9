"""`ConvGeometry`: what it accepts, what it refuses and how it says so, against torch's own layers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import COUNT, FAMILIES, LIMIT, case, dense_shape, indices, random_fields
from opnorm.geometry import ConvGeometry

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
FIELDS = {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 3), "input_size": (5, 7)}


def geometry(**changes) -> ConvGeometry:
    return ConvGeometry(**(FIELDS | changes))


# What the random cases cover: a law that is tested on nothing holds.


def test_the_random_cases_cover_every_feature():
    drawn = [case(i).geometry for i in range(COUNT)]
    assert COUNT >= 2000
    assert len(set(drawn)) >= 2000
    assert max(max(dense_shape(g)) for g in drawn) <= LIMIT
    features = Counter()
    for g in drawn:
        features.update({f"{g.dim}D", g.kind, g.padding_mode, *(f"stride {s}" for s in g.stride)})
        features.update({f"dilation {d}" for d, k in zip(g.dilation, g.kernel_size, strict=True) if k > 1})
        features["transposed"] += g.transposed
        features["output padding"] += any(g.output_padding)
        features["one sided"] += any(a != b for a, b in g.padding)
        features["multiplier"] += g.kind == "depthwise" and g.out_channels > g.in_channels
        features["single output"] += 1 < g.groups == g.out_channels < g.in_channels
        features["padding beyond the kernel"] += any(max(p) >= e for p, e in zip(g.padding, g.extent, strict=True))
        features["kernel beyond the input"] += any(e > n for e, n in zip(g.extent, g.input_size, strict=True))
        features["even kernel"] += any(k % 2 == 0 for k in g.kernel_size)
        features["unequal sizes"] += len(set(g.input_size)) > 1
        features["moved pointwise"] += g.kind == "pointwise" and any(map(any, g.padding)) and max(g.stride) > 1
    wanted = {
        "0D",
        "1D",
        "2D",
        "3D",
        "linear",
        "pointwise",
        "depthwise",
        "grouped",
        "dense",
        "transposed",
        "multiplier",
    }
    wanted |= {"zeros", "reflect", "replicate", "circular", "one sided", "padding beyond the kernel", "output padding"}
    wanted |= {"stride 1", "stride 2", "stride 3", "stride 4", "dilation 1", "dilation 2", "dilation 3", "even kernel"}
    wanted |= {"kernel beyond the input", "single output", "unequal sizes", "moved pointwise"}
    assert {name: features[name] for name in wanted if features[name] < 50} == {}


def test_a_case_is_a_function_of_its_index():
    first = case(17)
    case.cache_clear()
    assert case(17) == first
    assert case(17).operator() is case(17).operator()


# Against torch


def torch_accepts(fields) -> tuple[int, ...] | None:
    """The output size that torch's own layer computes, or None where it refuses."""
    fields = dict(fields)
    size, kernel = fields.pop("input_size"), fields.pop("kernel_size")
    kinds = CONV_TRANSPOSE if fields.pop("transposed", False) else CONV
    if kinds is CONV and any(fields.pop("output_padding", ())):
        return None  # no such argument
    if min(fields["dilation"]) < 1:
        return None  # Conv refuses it, ConvTranspose forgets to look
    try:
        module = kinds[len(kernel)](kernel_size=kernel, bias=False, **fields)
        shape = tuple(module(torch.zeros(1, fields["in_channels"], *size)).shape[2:])
        return shape if all(shape) else None  # ConvTranspose3d alone returns empty outputs
    except (ValueError, RuntimeError, TypeError):
        return None


def random_arguments(rng: random.Random):
    """Arguments as torch's modules take them, one in two spoiled somewhere."""
    fields = random_fields(rng, rng.choice([f for f in FAMILIES if f != "linear"]), rng.randint(1, 3))
    padding, transposed = fields["padding"], fields["transposed"]
    if not isinstance(padding, (int, str)):
        fields["padding"] = tuple(p if isinstance(p, int) else max(p) for p in padding)
    dim = len(fields["input_size"])
    spoil = rng.choice(
        ("", "", "", "groups", "stride", "padding", "output_padding", "mode", "small", "dilation", "same")
    )
    if spoil == "groups":
        fields["groups"] = rng.randint(1, 5)
    elif spoil in ("stride", "dilation"):
        fields[spoil] = tuple(rng.randint(0, 3) for _ in range(dim))
    elif spoil == "padding":
        fields["padding"] = tuple(rng.randint(0, 9) for _ in range(dim))
    elif spoil == "output_padding":
        fields["output_padding"] = tuple(rng.randint(0, 4) for _ in range(dim))
    elif spoil == "mode":
        fields["padding_mode"] = rng.choice(("zeros", "reflect", "replicate", "circular", "constant"))
    elif spoil == "small":
        fields["input_size"] = tuple(rng.randint(1, 3) for _ in range(dim))
    elif spoil == "same":
        fields["padding"] = rng.choice(("same", "valid", "full"))
    if transposed and spoil == "mode":
        fields.setdefault("padding_mode", "zeros")
    return fields


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_it_refuses_exactly_what_torch_refuses():
    rng = random.Random(0)
    accepted = refused = 0
    for trial in range(4000):
        fields = random_arguments(rng)
        theirs = torch_accepts(fields)
        try:
            ours = ConvGeometry(**fields).output_size
        except ValueError as error:
            ours, message = None, str(error)
            assert "expected" in message, f"trial {trial}: {fields}: {message}"
            assert ", got " in message, f"trial {trial}: {fields}: {message}"
            assert "; " in message, f"trial {trial}: {fields}: {message}, without what to do"
        assert ours == theirs, f"trial {trial}: {fields}"
        accepted, refused = accepted + (ours is not None), refused + (ours is None)
    assert min(accepted, refused) > 800


@pytest.mark.parametrize("name", ["in_channels", "out_channels", "groups", "kernel_size", "stride", "dilation"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, None])
def test_what_must_be_a_positive_integer(name, value):
    with pytest.raises(ValueError, match=f"expected {name} as .*, got {value!r}; "):
        geometry(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 3}, r"expected in_channels divisible by groups, got in_channels=4 and groups=3; "),
        ({"out_channels": 7, "groups": 2}, r"expected out_channels divisible by groups, got out_channels=7"),
        (
            {"kernel_size": (3, 3, 3)},
            r"expected input_size with 3 spatial dimensions, .* got \(5, 7\); leave out batch",
        ),
        ({"input_size": (1, 4, 5, 7)}, r"expected input_size with 2 spatial dimensions"),
        ({"input_size": (0, 7)}, r"expected input_size as an integer of at least 1, got 0; "),
        ({"kernel_size": (3,) * 4, "input_size": (5,) * 4}, r"expected 1, 2 or 3 spatial dimensions .* got 4; "),
        (
            {"kernel_size": 3, "input_size": None},
            r"expected kernel_size as a tuple when input_size is None, got 3; write",
        ),
        ({"stride": (1, 2, 3)}, r"expected stride as one integer or 2 of them, got \(1, 2, 3\); "),
        ({"padding": -1}, r"expected padding as an integer of at least 0, got -1; "),
        ({"padding": (1, 2, 3)}, r"expected padding as one integer, 2 of them, or 2 pairs .* got \(1, 2, 3\); "),
        ({"padding": ((1, 2, 3), 1)}, r"expected padding as .* got \(1, 2, 3\); "),
        ({"padding": "full"}, r"expected padding as 'same', 'valid' or numbers, got 'full'; "),
        (
            {"padding": "same", "stride": 2},
            r"expected stride 1 with padding='same', got \(2, 2\); give the padding in numbers",
        ),
        (
            {"padding": "same", "transposed": True},
            r"expected padding as numbers for a transposed convolution, got 'same'; ",
        ),
        ({"padding_mode": "constant"}, r"expected padding_mode in .*, got 'constant'; "),
        (
            {"padding_mode": "circular", "transposed": True},
            r"expected padding_mode='zeros' for a transposed .* got 'circular'; ",
        ),
        (
            {"padding_mode": "reflect", "padding": 5},
            r"expected reflect padding of at most 4 for input size 5, got \(5, 5\)",
        ),
        (
            {"padding_mode": "circular", "padding": 6},
            r"expected circular padding of at most 5 for input size 5, got \(6, 6\)",
        ),
        ({"output_padding": 1}, r"expected output_padding=0 for a convolution, got \(1, 1\); pass transposed=True"),
        (
            {"output_padding": 2, "stride": 2, "transposed": True},
            r"expected output_padding smaller than .* got 2 with stride 2",
        ),
        ({"kernel_size": (7, 3)}, r"expected an output of at least one element, got size -1 in dimension 0.*; enlarge"),
        (
            {"padding": (4, 1), "transposed": True, "input_size": (3, 3)},
            r"expected an output of .* got size -3 in dimension 0",
        ),
    ],
)
def test_a_refusal_says_what_was_expected_what_came_and_what_to_do(changes, message):
    with pytest.raises(ValueError, match=message) as refusal:
        geometry(**changes)
    assert "; " in str(refusal.value)


# From modules


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, 1, 2, "same", "valid", "per dimension"])
def test_from_a_convolution(dim, mode, padding):
    padding = tuple(range(dim)) if padding == "per dimension" else padding
    stride = 1 if padding == "same" else 2
    size = (5, 7, 3)[:dim]
    module = CONV[dim](4, 6, 3, stride, padding, dilation=1, groups=2, padding_mode=mode)
    g = ConvGeometry.from_module(module, size)
    assert g == ConvGeometry(4, 6, (3,) * dim, size, stride=stride, padding=padding, groups=2, padding_mode=mode)
    assert g.weight_shape == module.weight.shape
    assert g.output_size == module(torch.zeros(1, 4, *size)).shape[2:]
    assert (g.dim, g.padding_mode, g.transposed, g.kind) == (dim, mode, False, "grouped")


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_from_a_transposed_convolution(dim):
    size = (5, 7, 3)[:dim]
    module = CONV_TRANSPOSE[dim](4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2)
    g = ConvGeometry.from_module(module, size)
    assert g.weight_shape == module.weight.shape == (4, 3, *[3] * dim)
    assert g.output_size == module(torch.zeros(1, 4, *size)).shape[2:]
    assert g.transposed
    assert g.output_padding == (1,) * dim


def test_from_a_linear_layer():
    g = ConvGeometry.from_module(nn.Linear(5, 3), None)
    assert g == ConvGeometry(5, 3, (), ()) == ConvGeometry.from_module(nn.Linear(5, 3), (2, 7))
    assert (g.kind, g.weight_shape, g.output_size, g.dim, g.has_size) == ("linear", (3, 5), (), 0, True)


def test_from_a_module_of_any_size():
    g = ConvGeometry.from_module(nn.Conv2d(3, 5, 3, padding=1), None)
    assert g.input_size == g.output_size == (None, None)


def test_from_another_module():
    with pytest.raises(ValueError, match=r"expected an nn\.Conv1d/2d/3d, .* got BatchNorm2d; describe"):
        ConvGeometry.from_module(nn.BatchNorm2d(3), (5, 7))
    with pytest.raises(ValueError, match="expected an initialised layer, got a LazyConv2d; run it on a batch first"):
        ConvGeometry.from_module(nn.LazyConv2d(3, 3), (5, 7))


@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (4, 1), (2, 3), (5, 2)])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_same_padding_puts_the_odd_element_where_torch_puts_it(kernel, dilation):
    module = nn.Conv1d(1, 1, kernel, padding="same", dilation=dilation, bias=False).double()
    g = ConvGeometry.from_module(module, 11)
    x = torch.randn(1, 1, 11, dtype=torch.float64)
    padded = F.conv1d(F.pad(x, g.padding[0]), module.weight, dilation=dilation)
    assert torch.allclose(module(x), padded, rtol=1e-13, atol=1e-13)


# Values


def test_arguments_in_every_form_are_the_same_geometry():
    plain = geometry(padding=1, stride=2)
    assert plain == geometry(kernel_size=3, padding=(1, 1), stride=(2, 2))
    assert plain == geometry(kernel_size=[3, 3], padding=[(1, 1), (1, 1)], stride=[2, 2], input_size=[5, 7])
    assert plain == geometry(padding=(1, (1, 1)), stride=2, input_size=torch.Size([5, 7]))
    assert geometry(padding="valid") == geometry(padding=0)
    assert geometry(padding="same") == geometry(padding=1)
    assert ConvGeometry(1, 1, 3, 5) == ConvGeometry(1, 1, (3,), (5,))
    assert ConvGeometry(1, 1, 3, (5, 7)).kernel_size == (3, 3)


def test_equal_geometries_hash_alike_and_others_differ():
    changes = [{}, {"stride": 2}, {"padding": 1}, {"padding": ((1, 0), (1, 1))}, {"dilation": 2}, {"groups": 2}]
    changes += [{"transposed": True}, {"input_size": (7, 5)}, {"input_size": None}, {"input_size": (5, None)}]
    changes += [{"padding": 1, "padding_mode": "circular"}, {"stride": 2, "transposed": True}]
    changes += [{"stride": 2, "transposed": True, "output_padding": 1}, {"in_channels": 6, "out_channels": 4}]
    every = {geometry(**c) for c in changes}
    assert len(every) == len(changes)
    assert every == {geometry(**c) for c in changes}
    assert hash(geometry(stride=2)) == hash(geometry(stride=(2, 2)))
    assert geometry() != "geometry"


def test_it_is_frozen():
    with pytest.raises(FrozenInstanceError):
        geometry().stride = (2, 2)  # type: ignore[misc]


def test_at_is_the_same_layer_at_another_size():
    for index in indices(300):
        g = case(index).geometry
        bigger = tuple(n + 13 for n in g.input_size)  # type: ignore[operator]
        assert g.at(bigger).at(g.input_size) == g
        assert g.at(bigger).input_size == bigger
        assert g.at(None).input_size == g.at(None).output_size == (None,) * g.dim


def test_one_dimension_of_any_size():
    g = geometry(input_size=(5, None), padding=1)
    assert (g.has_size, g.output_size) == (False, (5, None))
    assert geometry().has_size


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "dense"),
        ({"groups": 2}, "grouped"),
        ({"groups": 4, "out_channels": 4}, "depthwise"),
        ({"groups": 4, "out_channels": 8}, "depthwise"),
        ({"groups": 2, "out_channels": 2}, "grouped"),
        ({"in_channels": 1}, "depthwise"),
        ({"kernel_size": 1}, "pointwise"),
        ({"kernel_size": 1, "stride": 2, "padding": 1}, "pointwise"),
        ({"kernel_size": 1, "groups": 2}, "grouped"),
        ({"kernel_size": 1, "groups": 4, "out_channels": 4}, "depthwise"),
        ({"kernel_size": (), "input_size": ()}, "linear"),
    ],
)
def test_kind(changes, kind):
    assert geometry(**changes).kind == kind
    if changes.get("kernel_size") != ():
        assert geometry(transposed=True, **changes).kind == kind


def test_is_matrix_where_the_operator_is_copies_of_the_matrix():
    """True means ‖K‖ = ‖Θ‖ exactly: compared with the dense operator, also where every output reads padding."""
    seen = Counter()
    for index in indices():
        operator = case(index).operator()
        if operator.geometry.kind not in ("pointwise", "linear"):
            assert not operator.geometry.is_matrix
            continue
        matrix = operator.weight.flatten(1)
        truth, norm = (torch.linalg.matrix_norm(m, 2) for m in (operator.to_dense(), matrix))
        seen[operator.geometry.is_matrix] += 1
        if operator.geometry.is_matrix:
            assert torch.isclose(truth, norm, rtol=1e-12, atol=0), case(index)
    assert min(seen.values()) > 50


def test_it_prints_its_sizes_in_one_line():
    assert str(geometry(stride=2, input_size=(56, 48))) == "dense 4→6, 3×3 on 56×48, stride 2×2"
    assert str(geometry(input_size=None, transposed=True)) == "dense 4→6, 3×3 on any×any, transposed"
    assert str(ConvGeometry(5, 3, (), ())) == "linear 5→3"


def test_axes_of_a_transposed_convolution_are_those_of_the_convolution_whose_adjoint_it_is():
    g = ConvGeometry(4, 6, 3, 5, stride=2, padding=1, output_padding=1, transposed=True)
    forward = ConvGeometry(6, 4, 3, 10, stride=2, padding=1)
    assert g.axes == forward.axes
    assert g.output_size == forward.input_size
    assert g.weight_shape == forward.weight_shape


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_the_source_of_a_padded_position_is_what_torch_reads_there(mode):
    axis = ConvGeometry(1, 1, 3, 5, padding=((4, 3),), padding_mode=mode).axes[0]
    x = torch.arange(5.0)[None, None]
    padded = F.pad(x, (4, 3), mode={"zeros": "constant"}.get(mode, mode), **({"value": -1} if mode == "zeros" else {}))
    sources = [axis.source(p - 4) for p in range(5 + 7)]
    assert padded[0, 0].tolist() == [-1.0 if q is None else float(q) for q in sources]


def test_the_source_of_an_axis_of_any_size_is_refused():
    with pytest.raises(
        ValueError, match=r"expected a geometry with an input size, got input_size=None; use geometry\.at"
    ):
        geometry(input_size=None).axes[0].source(0)

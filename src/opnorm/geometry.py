"""`ConvGeometry`: everything about a convolution except its weight.

Per dimension, with input size N, kernel k, dilation δ, extent e = δ(k-1)+1, stride s, padding a before and b after,
the output size is N_out = ⌊(N + a + b - e) / s⌋ + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
Size = int | Sequence[int | None] | None


class Axis(NamedTuple):
    """One spatial dimension of a plain convolution: output i reads inputs s·i + δ·n - before for n = 0..kernel-1.

    A transposed convolution is described by the convolution whose adjoint it is, since both have the same norm.
    """

    kernel: int
    dilation: int
    stride: int
    before: int
    after: int
    inputs: int | None
    outputs: int | None
    mode: str

    @property
    def extent(self) -> int:
        """e = δ(k-1)+1, the number of inputs that one output spans."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def size(self) -> tuple[int, int]:
        """How many inputs and outputs there are."""
        if self.inputs is None or self.outputs is None:
            raise ValueError("expected a geometry with an input size, got input_size=None; use geometry.at(input_size)")
        return self.inputs, self.outputs

    @property
    def is_copy(self) -> bool:
        """Whether this axis copies or drops inputs: one tap, no input read twice, at least one read. Its norm is 1."""
        if self.kernel > 1 or self.mode != "zeros":
            return False
        if self.inputs is None or self.outputs is None:
            return True
        first = -(-self.before // self.stride)  # the first output whose tap is not in the padding before
        return first < self.outputs and self.stride * first - self.before < self.inputs

    def source(self, position: int) -> int | None:
        """The input behind a position that may lie in the padding; None where the padding is a zero."""
        size = self.size[0]
        if 0 <= position < size:
            return position
        if self.mode == "circular":
            return position % size
        if self.mode == "replicate":
            return min(max(position, 0), size - 1)
        if self.mode == "reflect":
            return -position if position < 0 else 2 * (size - 1) - position
        return None

    def reads(self, output: int) -> list[int | None]:
        """The input behind each tap of the window of an output."""
        start = self.stride * output - self.before
        return [self.source(start + self.dilation * tap) for tap in range(self.kernel)]


@dataclass(frozen=True, init=False)
class ConvGeometry:
    """The sizes of a linear layer, validated once: hashable, without tensors, a key for caches and batches.

    torch's own modules know everything listed here but the input size, and without that a convolution has no norm.

    Args:
        in_channels: as in `torch.nn.Conv2d` and `ConvTranspose2d`, and so are all arguments that are not listed here.
        kernel_size: as there; `()` is a linear layer.
        input_size: the spatial size of the input. `None`, for the whole or for one dimension, means any size.
        padding: as there; or per side, as one (before, after) pair per dimension.
        transposed: whether this is a transposed convolution.

    Examples:
        >>> ConvGeometry(32, 32, 3, (56, 56), stride=2, padding=1, groups=32).output_size
        (28, 28)
    """

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    input_size: tuple[int | None, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    transposed: bool
    output_padding: tuple[int, ...]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        input_size: Size,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] | Sequence[tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        transposed: bool = False,
        output_padding: int | Sequence[int] = 0,
    ):
        dim = _dimension(kernel_size, input_size)
        kernel = _per_dimension("kernel_size", kernel_size, dim, least=1)
        strides = _per_dimension("stride", stride, dim, least=1)
        dilations = _per_dimension("dilation", dilation, dim, least=1)
        fields = {
            "in_channels": _integer("in_channels", in_channels, 1),
            "out_channels": _integer("out_channels", out_channels, 1),
            "kernel_size": kernel,
            "input_size": _input_size(input_size, dim),
            "stride": strides,
            "padding": _padding(padding, kernel, strides, dilations, bool(transposed)),
            "dilation": dilations,
            "groups": _integer("groups", groups, 1),
            "padding_mode": padding_mode,
            "transposed": bool(transposed),
            "output_padding": _per_dimension("output_padding", output_padding, dim, least=0),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._validate()

    @classmethod
    def from_module(cls, module: nn.Module, input_size: Size) -> ConvGeometry:
        """The geometry of an `nn.Conv1d/2d/3d`, `nn.ConvTranspose1d/2d/3d` or `nn.Linear` on inputs of `input_size`."""
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise ValueError(f"expected an initialised layer, got a {type(module).__name__}; run it on a batch first")
        if isinstance(module, nn.Linear):
            return cls(module.in_features, module.out_features, (), ())
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if not isinstance(module, kinds):
            raise ValueError(
                f"expected an nn.Conv1d/2d/3d, nn.ConvTranspose1d/2d/3d or nn.Linear, got {type(module).__name__}; "
                "describe other layers with ConvGeometry(...) itself"
            )
        return cls(
            module.in_channels,
            module.out_channels,
            module.kernel_size,
            input_size,
            stride=module.stride,
            padding=module.padding if isinstance(module.padding, str) else tuple(module.padding),
            dilation=module.dilation,
            groups=module.groups,
            padding_mode=module.padding_mode,
            transposed=module.transposed,
            output_padding=module.output_padding,
        )

    def at(self, input_size: Size) -> ConvGeometry:
        """The same layer on inputs of another size."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return ConvGeometry(**(fields | {"input_size": input_size}))

    @property
    def dim(self) -> int:
        """The number of spatial dimensions: 1, 2 or 3, and 0 for a linear layer."""
        return len(self.kernel_size)

    @property
    def extent(self) -> tuple[int, ...]:
        """e = δ(k-1)+1 per dimension."""
        return tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True))

    @property
    def output_size(self) -> tuple[int | None, ...]:
        """The spatial size of the output, None where the input size is None."""
        return tuple(self._output(i) for i in range(self.dim))

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(in_channels, *input_size) and (out_channels, *output_size); an error if there is no input size."""
        sizes = [a.size for a in self.axes]
        read, written = (tuple(s[i] for s in sizes) for i in (self.transposed, not self.transposed))
        return (self.in_channels, *read), (self.out_channels, *written)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape that torch gives the weight of this layer."""
        rows, columns = (
            (self.in_channels, self.out_channels) if self.transposed else (self.out_channels, self.in_channels)
        )
        return (rows, columns // self.groups, *self.kernel_size)

    @property
    def kind(self) -> str:
        """`"linear"`, `"pointwise"`, `"depthwise"` (one input channel a group), `"grouped"` or `"dense"`."""
        if self.dim == 0:
            return "linear"
        if math.prod(self.kernel_size) == 1 and self.groups == 1:
            return "pointwise"
        if self.groups == self.in_channels:
            return "depthwise"
        return "dense" if self.groups == 1 else "grouped"

    @property
    def is_matrix(self) -> bool:
        """Whether the operator is copies of the connectivity matrix, one for each position, and so has its norm.

        True for linear layers, and for 1×1 convolutions that read each position once.
        """
        return self.kind == "linear" or (self.kind == "pointwise" and all(axis.is_copy for axis in self.axes))

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The dimensions of the convolution, or of the convolution whose adjoint this transposed convolution is."""
        return tuple(self._axis(i) for i in range(self.dim))

    @property
    def has_size(self) -> bool:
        """Whether the input size is known in every dimension."""
        return None not in self.input_size

    def __str__(self) -> str:
        size = "×".join("any" if n is None else str(n) for n in self.input_size)
        kernel = "×".join(map(str, self.kernel_size))
        text = f"{self.kind} {self.in_channels}→{self.out_channels}"
        if self.dim:
            text += f", {kernel} on {size}"
        if self.stride != (1,) * self.dim:
            text += f", stride {'×'.join(map(str, self.stride))}"
        return text + (", transposed" if self.transposed else "")

    def _axis(self, i: int) -> Axis:
        k, d, s, (a, b) = self.kernel_size[i], self.dilation[i], self.stride[i], self.padding[i]
        if self.transposed:
            return Axis(k, d, s, a, b, self._output(i), self.input_size[i], "zeros")
        mode = self.padding_mode if (a or b) else "zeros"
        return Axis(k, d, s, a, b, self.input_size[i], self._output(i), mode)

    def _output(self, i: int) -> int | None:
        n = self.input_size[i]
        if n is None:
            return None
        a, b = self.padding[i]
        if self.transposed:
            return (n - 1) * self.stride[i] - a - b + self.extent[i] + self.output_padding[i]
        return (n + a + b - self.extent[i]) // self.stride[i] + 1

    def _validate(self) -> None:
        if self.dim == 0 and self.groups > 1:
            raise ValueError(
                f"expected groups=1 for a linear layer, got {self.groups}; describe it as a 1×1 convolution with groups"
            )
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise ValueError(
                    f"expected {name} divisible by groups, got {name}={getattr(self, name)} and groups={self.groups}; "
                    f"change one of them"
                )
        if self.padding_mode not in PADDING_MODES:
            raise ValueError(f"expected padding_mode in {PADDING_MODES}, got {self.padding_mode!r}; choose one of them")
        if self.transposed and self.padding_mode != "zeros":
            raise ValueError(
                f"expected padding_mode='zeros' for a transposed convolution, got "
                f"{self.padding_mode!r}; torch has no other"
            )
        if not self.transposed and any(self.output_padding):
            raise ValueError(
                f"expected output_padding=0 for a convolution, got {self.output_padding}; pass transposed=True"
            )
        for i in range(self.dim):
            self._validate_dimension(i)

    def _validate_dimension(self, i: int) -> None:
        n, (a, b), s, d = self.input_size[i], self.padding[i], self.stride[i], self.dilation[i]
        if self.transposed and self.output_padding[i] >= max(s, d):
            raise ValueError(
                f"expected output_padding smaller than stride or dilation, got {self.output_padding[i]} with "
                f"stride {s} and dilation {d} in dimension {i}; torch refuses it too"
            )
        if n is None:
            return
        out = cast(int, self._output(i))
        if out < 1:
            raise ValueError(
                f"expected an output of at least one element, got size {out} in dimension {i}: input {n}, padding "
                f"({a}, {b}), kernel extent {self.extent[i]}; enlarge the input or the padding"
            )
        most = {"reflect": n - 1, "circular": n}.get(self.padding_mode)
        if most is not None and max(a, b) > most:
            raise ValueError(
                f"expected {self.padding_mode} padding of at most {most} for input size {n}, got ({a}, {b}) in "
                f"dimension {i}; use less padding or a larger input"
            )


def _dimension(kernel_size: int | Sequence[int], input_size: Size) -> int:
    if isinstance(kernel_size, Iterable):
        dim = len(tuple(kernel_size))
    elif isinstance(input_size, Iterable):
        dim = len(tuple(input_size))
    elif input_size is not None:
        dim = 1
    else:
        raise ValueError(
            f"expected kernel_size as a tuple when input_size is None, got {kernel_size!r}; write for instance "
            f"({kernel_size}, {kernel_size}) for two dimensions"
        )
    if dim > 3:
        raise ValueError(
            f"expected 1, 2 or 3 spatial dimensions (0 for a linear layer), got {dim}; leave out batch and channels"
        )
    return dim


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or (value := value.__index__()) < least:
        raise ValueError(f"expected {name} as an integer of at least {least}, got {value!r}; pass a plain int")
    return int(value)


def _per_dimension(name: str, value: int | Sequence[int], dim: int, *, least: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Iterable) else (value,) * dim
    if dim == 0 and (values or not (isinstance(value, Iterable) or value == least)):
        raise ValueError(f"expected no {name} for a linear layer, which has no spatial dimensions, got {value!r}")
    if len(values) != dim:
        raise ValueError(
            f"expected {name} as one integer or {dim} of them, got {value!r}; give one for each spatial dimension"
        )
    return tuple(_integer(name, v, least) for v in values)


def _input_size(input_size: Size, dim: int) -> tuple[int | None, ...]:
    sizes = tuple(input_size) if isinstance(input_size, Iterable) else (input_size,) * dim
    if len(sizes) != dim:
        raise ValueError(
            f"expected input_size with {dim} spatial dimensions, as kernel_size has, got {input_size!r}; leave out "
            "batch and channels"
        )
    return tuple(None if n is None else _integer("input_size", n, 1) for n in sizes)


def _padding(
    padding: Any, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], transposed: bool
) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str):
        return _named_padding(padding, kernel, stride, dilation, transposed)
    values = tuple(padding) if isinstance(padding, Iterable) else (padding,) * len(kernel)
    if not kernel and (values or not (isinstance(padding, Iterable) or padding == 0)):
        raise ValueError(f"expected no padding for a linear layer, which has no spatial dimensions, got {padding!r}")
    if len(values) != len(kernel):
        raise ValueError(
            f"expected padding as one integer, {len(kernel)} of them, or {len(kernel)} pairs (before, after), got "
            f"{padding!r}; give one for each spatial dimension"
        )
    pairs = (tuple(v) if isinstance(v, Iterable) else (v, v) for v in values)
    return tuple(cast(tuple[int, int], _per_dimension("padding", p, 2, least=0)) for p in pairs)


def _named_padding(
    padding: str, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], transposed: bool
) -> tuple[tuple[int, int], ...]:
    if transposed or padding not in ("same", "valid"):
        allowed = "numbers for a transposed convolution" if transposed else "'same', 'valid' or numbers"
        raise ValueError(f"expected padding as {allowed}, got {padding!r}; torch knows no other")
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if any(s != 1 for s in stride):
        raise ValueError(f"expected stride 1 with padding='same', got {stride}; give the padding in numbers")
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return tuple((t // 2, t - t // 2) for t in totals)

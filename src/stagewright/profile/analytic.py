"""Computes a profile for hardware of the catalog: every unit's time from its operations and bytes.

A unit takes the longer of its arithmetic and its memory traffic, plus a kernel launch. Arithmetic runs at a share of
the data sheet's peak by its kind: convolutions, matrix products, and kernels bound by memory. Convolutions run by one
of three algorithms: a 3x3 of stride 1 in plain fp32 may run as Winograd's F(4x4, 3x3), with four times fewer products
for 2.25 times the traffic of its inputs and outputs, twice; larger kernels of stride 1 as FFT tiles of 32x32;
everything else directly; one of one channel a group runs outside the matrix units, and a bias is added by a kernel of
its own. Layer norm and softmax run in fp32 where the rest is in half precision, as autocast has it. docs/planning.md
says how accurate this is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from stagewright.cluster.specs import HALF, DeviceSpec, Software
from stagewright.profile.profile import Table, Unit
from stagewright.profile.shapes import Convolution, Kind, Shape

Array = Any  # a numpy array
LAUNCH_SECONDS = 4e-6
_SHORT = 64  # a matrix product with an inner side of this length runs at half speed
_FFT_TILE = 32
_DEPTHWISE_SHARE = 0.04  # of the plain fp32 peak, with one channel a group
_DEPTHWISE_TRAFFIC = 3.5  # times that such a kernel moves its inputs and outputs
_GROUPED_SHARE = 0.2  # of the same peak, at least, with few channels a group, on cards with matrix units
_ODD_GROUP_SHARE = 0.09  # the same, at most, where the channels of a group are no power of two
_LONG_SHARE = 0.6  # of a square kernel's rate, for one that is one pixel wide or high
_NARROW = 32  # channels a group below which a convolution is a grouped one
_CAST_BYTES = 6.0  # autocast reads a weight in fp32 and writes it in half precision; its gradient the other way round
_NONE = -1.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device and its software achieve in one precision."""

    products: float  # operations per second in a large matrix product
    convolutions: float
    plain: float  # operations per second outside the matrix units
    grouped: float  # the same, at least, in grouped convolutions
    traffic: float  # bytes per second
    element: int  # bytes of an activation
    has_winograd: bool
    changes_layout: bool
    is_fused: bool
    has_autocast: bool
    efficiency: float

    @staticmethod
    def of(device: DeviceSpec, precision: str, software: Software) -> Rates:
        products, product_share = device.rate(precision, convolution=False)
        convolutions, convolution_share = device.rate(precision, convolution=True)
        half = precision in HALF
        in_fp32 = device.units(precision, convolution=True) == "fp32"
        return Rates(
            products * product_share,
            convolutions * convolution_share,
            device.peak["fp32"],
            device.peak["fp32"] * (device.family.grouped if in_fp32 else _GROUPED_SHARE),
            device.bandwidth * device.family.memory,
            2 if half else 8 if precision == "fp64" else 4,
            has_winograd=not half and in_fp32,
            changes_layout=half and device.has_matrix_units and not software.channels_last,
            is_fused=software.fused,
            has_autocast=half and not software.pure_half,
            efficiency=software.efficiency,
        )


@dataclass(frozen=True)
class Columns:
    """The shapes of a model as arrays over its units, with what does not depend on the device."""

    shapes: tuple[Shape, ...]
    operations: Array
    inputs: Array
    outputs: Array
    parameters: Array
    scores: Array
    passes: Array  # computes of backward for one of forward: of the weights, and of what the units before need
    fill: Array  # share of the peak that short sides leave
    tile_fill: Array
    gain: Array  # products that the transform saves; negative: no transform applies
    growth: Array
    waste: Array
    biases: Array  # outputs that a bias is added to, by a kernel of its own
    is_absorbed: Array  # runs inside the normalisation before it, in fused software
    kinds: dict[str, Array]

    @staticmethod
    def of(shapes: Sequence[Shape]) -> Columns:
        """The columns of a model; computed once."""
        return _columns(tuple(shapes))

    def seconds(self, rates: Rates, samples: int) -> tuple[Array, Array]:
        """Forward and backward seconds of every unit."""
        scale = samples * rates.element / rates.traffic
        inputs, outputs = self.inputs * scale, self.outputs * scale
        both = inputs + outputs
        operations = self.operations * samples
        casts = self.parameters * _CAST_BYTES / rates.traffic if rates.has_autocast else 0.0
        forward = both.copy()
        backward = 1.5 * both
        kinds = self.kinds

        dense = kinds["convolution"]
        forward[dense] = self._convolutions(rates, operations, both)[dense]
        narrow = kinds["grouped"]
        fast = np.maximum(rates.convolutions * self.fill, rates.grouped)
        arithmetic = operations / np.where(kinds["odd"], rates.plain * _ODD_GROUP_SHARE, fast)
        forward[narrow] = np.maximum(arithmetic, both)[narrow]
        deep = kinds["depthwise"]
        arithmetic = operations / (rates.plain * _DEPTHWISE_SHARE)
        forward[deep] = np.maximum(arithmetic, _DEPTHWISE_TRAFFIC * both)[deep]
        product = kinds["product"]
        weights = self.parameters * rates.element / rates.traffic
        forward[product] = np.maximum(operations / (rates.products * self.fill), weights + both)[product]
        computes = dense | narrow | deep | product
        backward[computes] = (forward * self.passes)[computes]

        forward += 2 * self.biases * scale  # read and written; backward sums the gradient
        backward += self.biases * scale

        # attention copies its heads apart and together, writes its scores, scales them, and takes their softmax in fp32
        attends = kinds["attention"]
        heads = np.where(self.scores > 0, 2 * both, 0.0)
        forward[attends] += heads[attends]
        backward[attends] += heads[attends]
        scores = self.scores * samples / rates.traffic
        ahead, back = (28.0, 34.0) if rates.has_autocast else (6.0 * rates.element, 8.0 * rates.element)
        forward[attends] += (scores * ahead)[attends]
        backward[attends] += (scores * back)[attends]

        total = kinds["sum"]  # passes its gradient on; where a branch began, two gradients are added
        backward[total] = both[total]
        factor = kinds["scale"]  # its gradient is a product as large as the activations, and theirs is of two branches
        backward[factor] = (4.5 * both)[factor]

        norm = kinds["norm"]  # forward reads twice and writes; backward reads both inputs twice and writes
        forward[norm], backward[norm] = 1.5 * both[norm], 2.5 * both[norm]
        layer = kinds["layer norm"]  # in fp32, with a change of precision before or behind it
        ahead, back = (4.5, 8.0) if rates.has_autocast else (1.5, 2.5)
        forward[layer], backward[layer] = ahead * both[layer], back * both[layer]
        pool = kinds["pool"]  # keeps 8-byte indices; backward clears, then scatters
        forward[pool] = (both + 8 * self.outputs * samples / rates.traffic)[pool]
        backward[pool] = (2 * inputs + 3 * outputs)[pool]

        trained = computes & (self.parameters > 0)
        forward = forward + np.where(trained, casts, 0.0) + LAUNCH_SECONDS
        backward = backward + np.where(trained, casts, 0.0) + 2 * LAUNCH_SECONDS
        backward[self.passes == 0] = 0.0
        free = kinds["view"] | (self.is_absorbed & rates.is_fused)
        forward[free] = backward[free] = 0.0
        return forward / rates.efficiency, backward / rates.efficiency

    def _convolutions(self, rates: Rates, operations: Array, traffic: Array) -> Array:
        """Forward seconds of convolutions, by the fastest algorithm that applies."""
        direct = np.maximum(operations / (rates.convolutions * self.fill), traffic)
        if rates.changes_layout:
            direct = direct + 2 * traffic
        if not rates.has_winograd:
            return direct
        products = operations * self.waste / (np.abs(self.gain) * rates.convolutions * self.tile_fill)
        tiled = products + (1 + 2 * self.growth * self.waste) * traffic
        return np.where(self.gain > 0, np.minimum(direct, tiled), direct)

    def workspaces(self, rates: Rates) -> Array:
        """Elements per sample that the transform of each convolution needs as workspace."""
        needed = self.growth * self.waste * (self.inputs + self.outputs)
        return np.where((self.gain > 0) & rates.has_winograd, needed, 0.0)


@cache
def _columns(shapes: tuple[Shape, ...]) -> Columns:
    rows = [_geometry(shape) for shape in shapes]
    fill, tile_fill, gain, growth, waste = (np.array(column) for column in zip(*rows, strict=True))
    absorbed, absorbs = [], False  # whether the previous kernel includes a pointwise unit that follows
    for shape in shapes:
        absorbed.append(absorbs and shape.kind is Kind.POINTWISE)
        absorbs = shape.kind is Kind.NORM or absorbed[-1]
    names = [_kernel(shape) for shape in shapes]
    known = (
        *("convolution", "grouped", "depthwise", "product", "attention"),
        *("norm", "layer norm", "pool", "view", "sum", "scale"),
    )
    kinds = {name: np.array([found == name for found in names]) for name in known}
    kinds["product"] = kinds["product"] | kinds["attention"]
    kinds["odd"] = np.array([_is_odd(shape.convolution) for shape in shapes])
    return Columns(
        shapes,
        np.array([shape.operations for shape in shapes], dtype=float),
        np.array([shape.inputs for shape in shapes], dtype=float),
        np.array([shape.outputs for shape in shapes], dtype=float),
        np.array([shape.parameters for shape in shapes], dtype=float),
        np.array([shape.scores for shape in shapes], dtype=float),
        np.array([_passes(shape, has_frozen=any(shape.frozen for shape in shapes)) for shape in shapes]),
        *(fill, tile_fill, gain, growth, waste),
        np.array([shape.outputs if _has_bias(shape) else 0 for shape in shapes], dtype=float),
        np.array(absorbed),
        kinds,
    )


def _passes(shape: Shape, *, has_frozen: bool) -> float:
    """How often backward computes what forward does; never behind parameters that are all frozen."""
    has_own = not has_frozen or shape.parameters > 0 or (not shape.frozen and shape.input_gradient)
    return float(has_own + shape.input_gradient)


def _kernel(shape: Shape) -> str:
    """Which kind of kernel runs a unit."""
    if shape.kind is Kind.VIEW:
        return "view"
    if shape.convolution is not None:
        each = shape.convolution.channels // shape.convolution.groups
        wide = shape.convolution.groups == 1 or each >= _NARROW
        return "convolution" if wide else "depthwise" if each == 1 else "grouped"
    if shape.kind is Kind.ATTENTION:
        return "attention"
    if shape.operations:
        return "product"
    if shape.kind is Kind.POINTWISE and shape.inputs >= 2 * shape.outputs:
        return "sum"
    own = {Kind.NORM: "norm", Kind.LAYER_NORM: "layer norm", Kind.POOL: "pool", Kind.SCALE: "scale"}
    return own.get(shape.kind, "pointwise")


def _has_bias(shape: Shape) -> bool:
    """Whether a convolution has one: more parameters than its weights."""
    own = shape.convolution
    return own is not None and shape.parameters > own.kernel * own.channels // own.groups * own.filters


def _is_odd(convolution: Convolution | None) -> bool:
    """Whether a group's channels are no power of two, which no fast kernel takes."""
    each = 0 if convolution is None else convolution.channels // convolution.groups
    return each & (each - 1) != 0


def _geometry(shape: Shape) -> tuple[float, float, float, float, float]:
    """The share of the peak that a unit's short sides leave, without and with a transform; the transform's figures."""
    convolution = shape.convolution
    if convolution is not None:
        width, channels = convolution.filters // convolution.groups, convolution.channels // convolution.groups
        tiled = _tiling(shape, convolution) or (_NONE, 0.0, 0.0)
        share = 1.0 if math.isqrt(convolution.kernel) ** 2 == convolution.kernel else _LONG_SHARE
        return (share * _fill(channels * convolution.kernel, width), _fill(channels, width), *tiled)
    if shape.kind is Kind.ATTENTION and shape.operations and shape.outputs:
        seen = shape.operations / (4 * shape.outputs)
        inner = shape.operations / (4 * shape.scores) if shape.scores else _SHORT
        return _fill(inner, seen), 1.0, _NONE, 0.0, 0.0
    if shape.operations and shape.parameters:
        tokens = max(1.0, shape.operations / (2 * shape.parameters))
        return _fill(shape.inputs / tokens, shape.outputs / tokens), 1.0, _NONE, 0.0, 0.0
    return 1.0, 1.0, _NONE, 0.0, 0.0


def _fill(inner: float, width: float) -> float:
    """The fraction of the peak that a product with short sides reaches."""
    return inner / (inner + _SHORT) * width / (width + _SHORT / 2)


def _tiling(shape: Shape, convolution: Convolution) -> tuple[float, float, float] | None:
    """The transform that applies to a convolution: factor of products saved, growth of traffic, waste at the edges."""
    side = math.isqrt(convolution.kernel)
    if convolution.stride != 1 or convolution.groups != 1 or convolution.channels < 16 or side < 3:
        return None
    if side == 3:
        tile, gain, growth = 4, 4.0, 2.25
    else:
        tile = _FFT_TILE + 1 - side
        spectrum = _FFT_TILE * (_FFT_TILE // 2 + 1)  # complex numbers of a tile, half of them by symmetry
        gain, growth = convolution.kernel * tile**2 / (4 * spectrum), 2 * spectrum / tile**2
    if tile < 1:
        return None
    output = math.sqrt(shape.outputs / convolution.filters)
    waste = (math.ceil(output / tile) * tile / output) ** 2
    return gain, growth, waste


def analytic_table(
    shapes: Sequence[Shape], device: DeviceSpec, precision: str, samples: int, software: Software
) -> Table:
    """Every unit of a model on a device of the catalog with some software, for microbatches of `samples`."""
    columns, rates = Columns.of(shapes), Rates.of(device, precision, software)
    forward, backward = columns.seconds(rates, samples)
    workspaces, element = columns.workspaces(rates), rates.element * samples
    units = tuple(
        Unit(
            shape.name,
            str(shape.kind),
            float(forward[index]),
            float(backward[index]),
            shape.parameters,
            shape.outputs * element,
            shape.live * element,
            shape.live_gradient * element,
            round(shape.saved * element),
            round(float(workspaces[index]) * element),
            shape.begins,
            shape.frozen,
        )
        for index, shape in enumerate(columns.shapes)
    )
    return Table(precision, samples, units)

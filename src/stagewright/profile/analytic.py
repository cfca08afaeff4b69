"""Computes a profile for hardware of the catalog: every unit's time from its operations and bytes.

A unit takes the longer of its arithmetic and its memory traffic, plus a kernel launch. Convolutions run by one of three
algorithms: a 3x3 of stride 1 in plain fp32 may run as Winograd's F(4x4, 3x3), with four times fewer products for 2.25
times the traffic of its inputs and outputs, twice; larger kernels of stride 1 as FFT tiles of 32x32; everything else
directly. The constants were checked layer by layer against measured profiles of AlexNet, VGG-16 and ResNet-50
(docs/planning.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagewright.cluster.specs import DeviceSpec, Software
from stagewright.profile.profile import Table, Unit
from stagewright.profile.shapes import Convolution, Kind, Shape

MEMORY_SHARE = 0.8  # fraction of the data sheet's bandwidth that a plain kernel reaches
LAUNCH_SECONDS = 4e-6
_SHORT = 64  # a matrix product with an inner side of this length runs at half speed
_FFT_TILE = 32
_HALF = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device and its software achieve in one precision."""

    products: float  # operations per second in a large matrix product
    convolutions: float
    traffic: float  # bytes per second
    element: int  # bytes of an activation
    has_winograd: bool
    changes_layout: bool
    is_fused: bool

    @staticmethod
    def of(device: DeviceSpec, precision: str, software: Software) -> Rates:
        products, product_share = device.rate(precision, convolution=False)
        convolutions, convolution_share = device.rate(precision, convolution=True)
        half = precision in _HALF
        return Rates(
            products * product_share,
            convolutions * convolution_share,
            device.bandwidth * MEMORY_SHARE,
            2 if half else 8 if precision == "fp64" else 4,
            has_winograd=not half and device.units(precision, convolution=True) == "fp32",
            changes_layout=half and not software.channels_last,
            is_fused=software.fused,
        )


def analytic_table(
    shapes: Sequence[Shape], device: DeviceSpec, precision: str, samples: int, software: Software
) -> Table:
    """Every unit of a model on a device of the catalog with some software, for microbatches of `samples`."""
    rates = Rates.of(device, precision, software)
    return Table(precision, samples, tuple(_units(shapes, rates, samples, software.efficiency)))


def _units(shapes: Sequence[Shape], rates: Rates, samples: int, efficiency: float) -> Iterator[Unit]:
    absorbs = False  # whether the previous kernel includes a pointwise unit that follows
    for shape in shapes:
        forward, backward = _seconds(shape, rates, samples)
        if shape.kind is Kind.POINTWISE and absorbs:
            forward = backward = 0.0
        absorbs = rates.is_fused and (shape.kind is Kind.NORM or (absorbs and shape.kind is Kind.POINTWISE))
        element = rates.element * samples
        yield Unit(
            shape.name,
            str(shape.kind),
            forward / efficiency,
            backward / efficiency,
            shape.parameters,
            shape.outputs * element,
            shape.live * element,
            shape.live_gradient * element,
            round(shape.saved * element),
            round(_workspace(shape, rates) * element),
        )


def _seconds(shape: Shape, rates: Rates, samples: int) -> tuple[float, float]:
    """Forward and backward seconds of one unit."""
    inputs, outputs = (count * samples * rates.element / rates.traffic for count in (shape.inputs, shape.outputs))
    weights = shape.parameters * rates.element / rates.traffic
    both = inputs + outputs
    if shape.kind is Kind.VIEW:
        return 0.0, 0.0
    if shape.convolution is not None:
        forward = convolution_seconds(shape, shape.convolution, rates, samples)
        backward = forward * (2 if shape.input_gradient else 1)
    elif shape.operations:
        forward = max(shape.operations * samples / rates.products, weights + both)
        backward = forward * (2 if shape.input_gradient else 1)
    elif shape.kind is Kind.NORM:  # forward reads twice and writes; backward reads both inputs twice and writes
        forward, backward = 1.5 * both, 2.5 * both
    elif shape.kind is Kind.POOL:  # a pool keeps 8-byte indices; backward clears, then scatters
        forward, backward = both + 8 * shape.outputs * samples / rates.traffic, 2 * inputs + 3 * outputs
    else:
        forward, backward = both, 1.5 * both
    return forward + LAUNCH_SECONDS, backward + 2 * LAUNCH_SECONDS


def convolution_seconds(shape: Shape, convolution: Convolution, rates: Rates, samples: int) -> float:
    """Forward seconds of a convolution, by the fastest algorithm that applies."""
    traffic = (shape.inputs + shape.outputs) * samples * rates.element / rates.traffic
    operations = shape.operations * samples
    width = convolution.filters // convolution.groups
    channels = convolution.channels // convolution.groups
    direct = max(operations / (rates.convolutions * _fill(channels * convolution.kernel, width)), traffic)
    if rates.changes_layout:
        direct += 2 * traffic
    tiled = _tiling(shape, convolution) if rates.has_winograd else None
    if tiled is None:
        return direct
    gain, growth, waste = tiled
    products = operations * waste / (gain * rates.convolutions * _fill(channels, width))
    return min(direct, products + (1 + 2 * growth * waste) * traffic)


def _workspace(shape: Shape, rates: Rates) -> float:
    """Elements per sample that the transform of a convolution needs as workspace."""
    if shape.convolution is None or not rates.has_winograd:
        return 0.0
    tiled = _tiling(shape, shape.convolution)
    return 0.0 if tiled is None else tiled[1] * tiled[2] * (shape.inputs + shape.outputs)


def _fill(inner: int, width: int) -> float:
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

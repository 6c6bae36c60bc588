"""A VAE's decoder that undoes the latents' projection exactly, written down instead of trained.

AutoencoderKL doubles pixels and convolves, three times. Nothing in that tells a convolution which of the two copies it
is at, so a trained decoder has to guess it from the neighbours and blurs small things. Two channels of the latents say
it: the parity of the column and of the row. From these every level finds its own parity, and splits what a cell holds
into what its four quarters hold:

    u = 0.8 p[i] + 1.2 p[i + 1]   of the doubled parity p (1 1 -1 -1): 2 or -2 at even places, 0.4 or -0.4 at odd ones
    even = (silu(S (u - A)) - silu(S (u - B)) + silu(S (-u - A)) - silu(S (-u - B))) / K   with S = K / (B - A)
    x * even = silu(x + G (even - 1)) - silu(-x + G (even - 1)),  as silu(x) - silu(-x) = x

Where u is a little off, as in latents that a transformer made, `even` is still 0 or 1; so it is at the last column,
where u is -0.8. The first residual block of a level splits columns, the second splits rows. Whatever passes a norm is
held twice, with both signs, so that its mean is zero; two channels of a large constant make the norm's spread a
constant.
"""

from __future__ import annotations

from typing import Any

import torch

K, G = 16.0, 24.0
"""What stands for even, and how far below zero what is not let through lies."""
A, B = 1.05, 1.25
"""Below A u is that of an odd place, above B that of an even one."""
PIN = 8192.0
"""The constant that outweighs everything else in a norm."""
FINE = 17
"""Numbers that stand for 4x4 pixels; more change nothing that could be seen."""

PLACES = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Row and column of a quarter."""

Matrix = torch.Tensor


class Channels:
    """Names for the channels of a tensor, given out one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0

    def take(self, number: int) -> slice:
        start, self.used = self.used, self.used + number
        assert self.used <= self.count, f"{self.used} of {self.count} channels"
        return slice(start, self.used)


class Trunk:
    """What the residual path holds at a place of a level.

    Attributes:
        plain: values that pass no activation here.
        pairs: values and the same negated.
        x, y: u, u, -u and -u of columns and of rows; columns are needed only before they are split.
        parity: of columns and of rows, for the next level.
        balance: minus the sum of plain and parity, so that the mean is zero.
        pins: the constant and the same negated.
    """

    def __init__(self, count: int, plain: int, pairs: int, balanced: bool) -> None:
        channels = Channels(count)
        self.count = count
        self.plain = channels.take(plain)
        self.pairs = (channels.take(pairs), channels.take(pairs))
        self.x, self.y = channels.take(0 if balanced else 4), channels.take(4)
        self.parity = channels.take(2)
        self.balance = channels.take(1 if balanced else 0)
        self.pins = channels.take(2)


def build(
    decoder: Any, unprojected: Matrix, color: torch.Tensor, spread: torch.Tensor, scale: float, shift: float
) -> None:
    """Write a decoder of four blocks with two residual blocks each and norms of one group.

    Args:
        decoder: of an AutoencoderKL, all zeros; its widths have to hold what is in a Trunk.
        unprojected: pixels, [192, C], of 8x8 in the order channel, row, column, for each of C components.
        color: red, green and blue where all components are zero, [3].
        spread: of each component, [C], by which the 4x4 pixels' numbers are chosen.
        scale, shift: of the VAE, undone first.
    """
    with torch.no_grad():
        levels = quarters(unprojected.double(), spread.double())
        trunk = _enter(decoder.conv_in, unprojected.shape[1], scale, shift)
        blocks = decoder.up_blocks
        for maps, before, block in zip(levels, blocks, blocks[1:], strict=False):
            trunk = _double(before.upsamplers[0].conv, trunk, maps[0].shape[2])
            trunk = _split_level(block.resnets, trunk, maps)
        _leave(decoder, trunk, color)


def quarters(unprojected: Matrix, spread: torch.Tensor) -> list[tuple[Matrix, Matrix]]:
    """For each level the maps from a cell's M numbers to its quarters' N: those of the upper two and of the lower two.

    Each is [2, N, M]; index 0 is the right quarter, at an odd column, and index 1 the left one.
    """
    blocks = unprojected.view(3, 8, 8, -1)
    coarse = torch.cat([_quarter(blocks, *place) * spread for place in PLACES], 1)
    basis = torch.linalg.svd(coarse, full_matrices=False)[0][:, :FINE]
    levels = [
        {place: basis.T @ _quarter(blocks, *place) / 4 for place in PLACES},
        {place: 4 * _quarter(basis.view(3, 4, 4, -1), *place) for place in PLACES},
        {place: _quarter(torch.eye(12, dtype=basis.dtype).view(3, 2, 2, 12), *place) for place in PLACES},
    ]
    return [(torch.stack([level[0, 1], level[0, 0]]), torch.stack([level[1, 1], level[1, 0]])) for level in levels]


def _quarter(pixels: torch.Tensor, row: int, column: int) -> Matrix:
    """One quarter of [3, S, S, M], as [3 S/2 S/2, M]."""
    half = pixels.shape[1] // 2
    return pixels[:, row * half : (row + 1) * half, column * half : (column + 1) * half].flatten(0, 2)


def _enter(conv: Any, components: int, scale: float, shift: float) -> Trunk:
    """The latents as they are."""
    trunk = Trunk(conv.out_channels, components, 0, balanced=False)
    for source, target in ((slice(0, components), trunk.plain), (slice(components, components + 2), trunk.parity)):
        _center(conv)[target, source] = torch.eye(source.stop - source.start) * scale
        conv.bias[target] = -scale * shift
    return trunk


def _double(conv: Any, before: Trunk, values: int) -> Trunk:
    """The convolution after doubling: values as pairs, and u of columns and rows."""
    after = Trunk(conv.out_channels, 0, values, balanced=False)
    for sign, target in zip((1, -1), after.pairs, strict=True):
        _center(conv)[target, before.plain] = sign * torch.eye(values)
    for target, parity, step in ((after.x, before.parity.start, (1, 2)), (after.y, before.parity.start + 1, (2, 1))):
        for channel, sign in zip(range(target.start, target.stop), (1, 1, -1, -1), strict=True):
            conv.weight[channel, parity, 1, 1] = 0.8 * sign
            conv.weight[channel, parity, step[0], step[1]] = 1.2 * sign
    conv.bias[after.pins] = torch.tensor([PIN, -PIN])
    return after


def _split_level(resnets: Any, trunk: Trunk, maps: tuple[Matrix, Matrix]) -> Trunk:
    """Both residual blocks of a level: columns, then rows."""
    upper, lower = maps
    last = upper.shape[1] == 3
    count = resnets[0].out_channels
    middle = Trunk(count, (2 if last else 1) * upper.shape[1], upper.shape[1], balanced=True)
    odd = torch.cat([lower[0], upper[0] - lower[0]])
    even = torch.cat([lower[1], upper[1] - lower[1]]) - odd
    _split_columns(resnets[0], trunk, middle, odd, even)
    _split_rows(resnets[1], middle)
    return middle


def _spread_out(values: Matrix, trunk: Trunk) -> Matrix:
    """Rows for plain values and pairs, [P + Q, M], as rows for a trunk's channels.

    The last level's plain values are there with both signs.
    """
    size = trunk.pairs[0].stop - trunk.pairs[0].start
    result = torch.zeros(trunk.count, values.shape[1], dtype=values.dtype)
    plain, paired = values[:size], values[size:]
    both = trunk.plain.stop - trunk.plain.start == 2 * size
    result[trunk.plain] = torch.cat([plain, -plain]) if both else plain
    result[trunk.pairs[0]], result[trunk.pairs[1]] = paired, -paired
    result[trunk.balance] = -result[trunk.plain].sum(0)
    return result


def _split_columns(resnet: Any, before: Trunk, after: Trunk, odd: Matrix, even: Matrix) -> None:
    """Values at odd columns are odd @ x, at even ones (odd + even) @ x."""
    shortcut = _center(resnet.conv_shortcut)
    shortcut[:, before.pairs[0]] = _spread_out(odd, after).float()
    shortcut[after.y, before.y] = torch.eye(4)
    shortcut[after.pins, before.pins] = torch.eye(2)
    gated, bit = _gate(resnet, before, before.x)
    change = _spread_out(even, after).float()
    for sign, units in zip((1, -1), gated, strict=True):
        _center(resnet.conv2)[:, units] = sign * change
    _set_parity(resnet.conv2, bit, after, 0)


def _split_rows(resnet: Any, trunk: Trunk) -> None:
    """Plain values get the pairs added at even rows."""
    gated, bit = _gate(resnet, trunk, trunk.y)
    size = trunk.pairs[0].stop - trunk.pairs[0].start
    change = torch.zeros(trunk.count, size)
    both = trunk.plain.stop - trunk.plain.start == 2 * size
    change[trunk.plain] = torch.cat([torch.eye(size), -torch.eye(size)]) if both else torch.eye(size)
    change[trunk.balance] = -change[trunk.plain].sum(0)
    for sign, units in zip((1, -1), gated, strict=True):
        _center(resnet.conv2)[:, units] = sign * change
    _set_parity(resnet.conv2, bit, trunk, 1)


def _gate(resnet: Any, trunk: Trunk, places: slice) -> tuple[tuple[slice, slice], slice]:
    """Norms and the first convolution: units whose activations are the pairs where `places` is even, and K there.

    Returns the units for the values and for the negated ones, and the one that is K at even places.
    """
    width = PIN * (2 / trunk.count) ** 0.5
    for pair in trunk.pairs:
        resnet.norm1.weight[pair] = width
    steep = K / (B - A)
    resnet.norm1.weight[places] = steep * width
    resnet.norm1.bias[places] = -steep * torch.tensor([A, B, A, B])
    conv = resnet.conv1
    size = trunk.pairs[0].stop - trunk.pairs[0].start
    channels = Channels(conv.out_channels)
    gated, bit, balance = (channels.take(size), channels.take(size)), channels.take(1), channels.take(1)
    pins = channels.take(2)
    kernel, signs = _center(conv), torch.tensor([1.0, -1, 1, -1])
    for sign, units in zip((1, -1), gated, strict=True):
        kernel[units, trunk.pairs[0]], kernel[units, trunk.pairs[1]] = sign * torch.eye(size), -sign * torch.eye(size)
        kernel[units, places] = signs * G / K
        conv.bias[units] = -G
    kernel[bit, places] = signs
    kernel[balance] = -kernel.sum(0)
    conv.bias[balance] = -conv.bias.sum()
    conv.bias[pins] = torch.tensor([PIN, -PIN])
    for units in (*gated, bit):
        resnet.norm2.weight[units] = PIN * (2 / conv.out_channels) ** 0.5
    return gated, bit


def _set_parity(conv: Any, bit: slice, trunk: Trunk, axis: int) -> None:
    """1 at even places, -1 at odd ones."""
    channel = trunk.parity.start + axis
    for target, sign in ((channel, 1), (trunk.balance, -1)):
        _center(conv)[target, bit] += sign * 2 / K
        conv.bias[target] -= sign


def _leave(decoder: Any, trunk: Trunk, color: torch.Tensor) -> None:
    """The last norm, activation and convolution: red, green and blue from both their signs."""
    norm, conv = decoder.conv_norm_out, decoder.conv_out
    norm.weight[trunk.plain] = PIN * (2 / trunk.count) ** 0.5
    kernel = _center(conv)
    kernel[:, trunk.plain] = torch.cat([torch.eye(3), -torch.eye(3)], 1)
    conv.bias.copy_(color)


def _center(conv: Any) -> Matrix:
    """The middle of a convolution's kernels, [out, in], to be written to."""
    middle = conv.weight.shape[2] // 2
    return conv.weight[:, :, middle, middle]

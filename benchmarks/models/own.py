"""Models built from torch alone, in ways that torchvision's are not: sequences, a U-Net, a learned codebook."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

VOCABULARY = 50
_WIDTH = 32


class TextTransformer(nn.Module):
    """torch's own encoder over token and position embeddings; the mean of the tokens is classified."""

    def __init__(self, classes: int = 10, depth: int = 4, tokens: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(_WIDTH, classes)

    def forward(self, ids: Tensor) -> Tensor:
        encoded = self.encoder(self.embed(ids) + self.positions)
        logits: Tensor = self.head(encoded.mean(1))
        return logits


class Recurrent(nn.Module):
    """An LSTM or a GRU over embedded tokens, as one module of four layers; the last token is classified."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.recurrent = kind(_WIDTH, _WIDTH, num_layers=4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(_WIDTH, classes)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embed(ids))
        logits: Tensor = self.head(hidden[:, -1])
        return logits


class StackedRecurrent(nn.Module):
    """The same as a list of modules of one layer each."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(kind(_WIDTH, _WIDTH, batch_first=True) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(_WIDTH, classes)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden, _ = layer(self.dropout(hidden))
        logits: Tensor = self.head(hidden[:, -1])
        return logits


class UNet(nn.Module):
    """Down three times and up again, each level joined with the one it mirrors; the mean over pixels is classified."""

    def __init__(self, classes: int = 10, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        channels = 3
        for width in widths:
            self.down.append(_convolutions(channels, width))
            channels = width
        self.pool = nn.MaxPool2d(2)
        self.middle = _convolutions(channels, 2 * channels)
        channels *= 2
        for width in reversed(widths):
            upsample = nn.ConvTranspose2d(channels, width, 2, stride=2)
            self.up.append(nn.ModuleDict({"upsample": upsample, "convolutions": _convolutions(2 * width, width)}))
            channels = width
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        levels = []
        for down in self.down:
            images = down(images)
            levels.append(images)
            images = self.pool(images)
        images = self.middle(images)
        for up in self.up:
            assert isinstance(up, nn.ModuleDict)
            images = up["convolutions"](torch.cat([levels.pop(), up["upsample"](images)], 1))
        logits: Tensor = self.head(images).mean((2, 3))
        return logits


def _convolutions(channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (channels, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Codebook(nn.Module):
    """The nearest of `size` vectors for each input vector; backward passes the gradient straight through.

    In training every used vector moves to the mean of its inputs, as running means that are buffers.
    """

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, size: int, width: int, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        codes = torch.randn(size, width)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(size))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        nearest = torch.cdist(flat, self.codes).argmin(1)
        chosen = self.codes[nearest].view_as(x)
        if self.training:
            with torch.no_grad():
                used = one_hot(nearest, len(self.codes)).to(flat.dtype)
                self.counts.mul_(self.decay).add_(used.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(used.t() @ flat, alpha=1 - self.decay)
                self.codes = self.sums / self.counts.clamp_min(1e-5).unsqueeze(1)
        return x + (chosen - x).detach()


class VectorQuantized(nn.Module):
    """A small convolutional network whose features pass a codebook, with the distance to it added to every logit."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(_convolutions(3, 8), nn.MaxPool2d(2), _convolutions(8, 16), nn.MaxPool2d(2))
        self.codebook = Codebook(24, 16)
        self.decoder = nn.Sequential(_convolutions(16, 16), nn.MaxPool2d(2), _convolutions(16, 16))
        self.head = nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Tensor:
        encoded = self.encoder(images).permute(0, 2, 3, 1)
        quantized = self.codebook(encoded)
        commitment = mse_loss(encoded, quantized.detach())
        decoded = self.decoder(quantized.permute(0, 3, 1, 2))
        logits: Tensor = self.head(decoded.mean((2, 3))) * (1 + 0.1 * commitment)
        return logits

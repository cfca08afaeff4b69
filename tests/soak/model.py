"""What the soak trains: small, with statistics and dropout, so that a lost or repeated microbatch changes bits."""

from torch import nn

IMAGE = 16
CUT = "4"  # after dropout


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * (IMAGE - 4) ** 2, 10),
    )

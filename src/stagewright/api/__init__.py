"""What a script imports: `stagewright.train` and the `Result` it returns. Nothing else of the package imports this folder."""

from stagewright.api.training import train
from stagewright.run.train import Result

__all__ = ["Result", "train"]

"""What a script imports: `stagewright.train` and the `Result` that it returns.

Only `stagewright/__init__.py` imports this folder, and only when a script asks for one of these names.
"""

from stagewright.api.training import train
from stagewright.run.train import Result

__all__ = ["Result", "train"]

"""What measures, calibrates and proves Stagewright itself: not in the wheel, and run as `python -m benchmarks NAME`.

`peers/` compares with stock PyTorch, `models/` cuts models of libraries, `learning/` is what lag costs in accuracy,
`micro/` times single parts, and `calibration/` fits the planner's constants. They import the package, never the other
way round.
"""

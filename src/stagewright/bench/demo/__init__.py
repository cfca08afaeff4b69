"""`stagewright demo`: stages and stock DistributedDataParallel train the same model in turns over a slow network.

`machines` makes two machines of one, `digits` draws the data, `run` plans, predicts and trains, `page` says what
happened. Only `cli` imports this folder.
"""

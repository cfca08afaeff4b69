"""`learning`: what lag costs in accuracy. One model under several modes and lags, from the same initial weights,
over the same samples, with several seeds.

A study (`study`) has trials; each trial is trained once per seed (`trials`, `runs`), and `findings` compares its runs
with the baseline's.
"""

"""How well the modes learn: one model under several lags, from the same weights, over the same samples."""

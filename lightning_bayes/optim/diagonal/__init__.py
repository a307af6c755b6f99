"""Mean-field posteriors: one algorithm per file, a pure `update` first, then the `torch.optim.Optimizer`."""

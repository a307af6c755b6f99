"""The size and shape of the source code, compared with its budgets and with an old commit."""

"""The command line: commands, the LightningCLI of this package, configs by name, runs on disk, and the demo.

Its modules are imported one by one: `commands` and `composition` do not import torch.
"""

"""One small pure function per layer type, in one file each. Importing this package imports all of them."""

import pkgutil
from importlib import import_module

from lightning_bayes.curvature.rules.registry import LayerRule, layer_rule, registered_rules, rule_for

__all__ = ["LayerRule", "layer_rule", "registered_rules", "rule_for"]

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

"""The global random states belong to the user: loading the package and constructing its objects leaves them alone."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import lightning_bayes

WATCHED = """
import importlib, inspect, json, logging, pkgutil, random, warnings
import numpy, torch, lightning.pytorch

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")

def states():
    name, keys, *rest = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), [name, keys.tolist(), *rest]

changed, walked, last = [], [], states()

def check(what):
    global last
    walked.append(what)
    if states() != last:
        changed.append(what)
        last = states()

import lightning_bayes
"""


def walked_in_a_fresh_process(code):
    """What `code` checked in a fresh interpreter, and after which of these checks a global random state had changed."""
    report = "\nprint('REPORT', json.dumps([walked, changed]))"
    program = WATCHED + textwrap.dedent(code) + report
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, done.stderr
    return json.loads(lines[-1].removeprefix("REPORT"))


def test_the_first_use_of_a_public_name_leaves_the_random_states():
    walked, changed = walked_in_a_fresh_process(
        """
        lightning_bayes.VOGNCallback
        check("VOGNCallback")
        for name in lightning_bayes.__all__:
            getattr(lightning_bayes, name)
            check(name)
        """
    )
    assert set(walked) == set(lightning_bayes.__all__)
    assert not changed


def test_importing_any_module_leaves_the_random_states():
    walked, changed = walked_in_a_fresh_process(
        """
        for module in pkgutil.walk_packages(lightning_bayes.__path__, "lightning_bayes."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
                check(module.name)
        """
    )
    assert {"lightning_bayes.private_torch", "lightning_bayes.zoo.models.lenet"} <= set(walked)
    assert not changed


def test_constructing_optimizers_and_callbacks_leaves_the_random_states():
    walked, changed = walked_in_a_fresh_process(
        """
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        base = torch.optim.Adam(net.parameters())
        last = states()  # the network's initialisation draws
        settings = ({}, {"lr": 0.1, "num_data": 10}, {"base": base, "num_data": 10}, {"num_data": 10})
        for name in lightning_bayes.__all__:
            kind = getattr(lightning_bayes, name)
            is_optimizer = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
            if inspect.isabstract(kind) or not (is_optimizer or name.endswith("Callback")):
                continue
            for arguments in [(net,)] if is_optimizer else [(), (2,)]:
                for keywords in settings:
                    try:
                        kind(*arguments, **keywords)
                    except (TypeError, ValueError):  # other arguments fit
                        continue
                    check(name)
        """
    )
    assert {"VOGN", "VOGNCallback", "IVON", "NoisyKFAC", "SWAGCallback", "DeepEnsembleCallback"} <= set(walked)
    assert not changed


def test_a_changed_state_is_found():
    draws = "torch.rand(1); check('torch'); random.random(); check('random'); numpy.random.rand(); check('numpy')"
    assert walked_in_a_fresh_process(draws)[1] == ["torch", "random", "numpy"]

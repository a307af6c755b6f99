"""Noise groups, samples over ranks, buckets and agreement: two gloo processes against one process."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from lightning.pytorch import LightningModule, Trainer
from tiny_training import (
    CLASSES,
    FEATURES,
    WHOLE,
    assert_close,
    assert_same_bits,
    blobs,
    fixed_loader,
    quiet_trainer,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bayes import (
    BayesDDPStrategy,
    IVONCallback,
    NoisyAdamCallback,
    NoisyKFACCallback,
    VadamCallback,
    VOGNCallback,
)
from lightning_bayes.errors import HyperparameterError, RankError

START = {"lr": 0.05, "init_precision": 60.0, "prior_precision": 2.0, "num_data": 48, "eval_samples": 0}
CALLBACKS = {
    "VOGN": lambda **more: VOGNCallback(**{**START, "betas": (0.9, 0.9), **more}),
    "Vadam": lambda **more: VadamCallback(**{**START, **more}),
    "IVON": lambda **more: IVONCallback(**{**START, **more}),
    "IVON of one layer": lambda **more: IVONCallback(**{**START, "bayesian": r"^net\.2", **more}),
    "NoisyAdam": lambda **more: NoisyAdamCallback(**{**START, **more}),
    "NoisyKFAC": lambda **more: NoisyKFACCallback(**{**START, "stats_interval": 2, "inverse_interval": 5, **more}),
}


def share(rank, parts):
    """Every batch's rows of one of `parts` equal ranks."""
    return [rows[rank * 8 // parts : (rank + 1) * 8 // parts] for rows in WHOLE]


class Net(LightningModule):
    """With BatchNorm or without; `broken` is the batch whose input is NaN."""

    def __init__(self, normalised=False, broken=None):
        super().__init__()
        middle = nn.BatchNorm1d(6) if normalised else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(FEATURES, 6), middle, nn.Linear(6, CLASSES))
        self.broken = broken

    def training_step(self, batch, batch_idx):
        x = batch[0] * float("nan") if batch_idx == self.broken else batch[0]
        return F.cross_entropy(self.net(x), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def train(callback, batches=None, data=None, normalised=False, broken=None, **options):
    torch.manual_seed(0)
    module = Net(normalised, broken)
    data = data or fixed_loader(batches)
    trainer = quiet_trainer(callback, num_sanity_val_steps=0, **{"max_epochs": 2, **options})
    trainer.fit(module, data)
    states = callback.optimizer.state
    kept = {f"{n}/{k}": torch.as_tensor(v) for n, p in module.named_parameters() for k, v in states[p].items()}
    return {**weights(module), **kept}


def on_ranks(world_size, **strategy):
    return {"strategy": BayesDDPStrategy(**strategy), "devices": world_size, "use_distributed_sampler": False}


def train_family(rank, world_size, groups, micro_batches, epochs, **options):
    """Every algorithm, with BatchNorm; a batch's shares lie on the ranks and, one after the other, on each of them."""
    parts = world_size * micro_batches
    shares = [share(rank * micro_batches + micro, parts) for micro in range(micro_batches)]
    batches = [rows for step in zip(*shares, strict=True) for rows in step]
    options |= {"max_epochs": epochs, "accumulate_grad_batches": micro_batches}
    return {
        name: train(make(), batches, normalised=True, **options, **on_ranks(world_size, num_groups=groups))
        for name, make in CALLBACKS.items()
    }


# -- numbers of the noise ---------------------------------------------------------------------------------------------


def strategy_of(rank, world_size, **arguments):
    """What a rank has, without its process."""
    places = SimpleNamespace(global_rank=lambda: rank, world_size=lambda: world_size)
    devices = [torch.device("cpu")] * world_size
    return BayesDDPStrategy(cluster_environment=places, parallel_devices=devices, **arguments)


@pytest.mark.parametrize(
    ("world_size", "micro_batches", "groups", "expected"),
    [
        (4, 1, None, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, 1, 1, [[0, 1]] * 4),
        (4, 1, 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (2, 2, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (1, 4, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (1, 4, 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (2, 2, None, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (3, 2, 2, [[0, 1]] * 3 + [[2, 3]] * 3),
    ],
)
def test_the_noise_of_every_pass(world_size, micro_batches, groups, expected):
    """Two samples per batch; by rank, then by micro-batch: the same list on four, two and one devices."""
    found = [
        strategy_of(rank, world_size, num_groups=groups).noise_samples(2, micro, micro_batches)
        for rank in range(world_size)
        for micro in range(micro_batches)
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("world_size", "groups", "shares"),
    [(1, None, False), (1, 4, False), (2, None, False), (2, 4, False), (2, 1, True), (4, 2, True), (4, 8, False)],
)
def test_whether_ranks_share_noise(world_size, groups, shares):
    assert strategy_of(0, world_size, num_groups=groups).shares_noise is shares


def added_gradients(rank, shares_noise):
    added = []
    BayesDDPStrategy.add_noise_group_ = lambda self, tensors: added.append(len(tensors))
    train(CALLBACKS["Vadam"](), share(rank, 2), max_epochs=1, **on_ranks(2, num_groups=1 if shares_noise else None))
    return added


@pytest.mark.parametrize("shares_noise", [True, False])
def test_gradients_of_a_group_are_added_only_where_ranks_share_it(shares_noise, tmp_path):
    """Vadam squares the gradient of a group; where each rank has groups of its own, nothing is to be added up."""
    number_and_gradients = 1 + 4  # of two layers
    for added in run_on_ranks(added_gradients, 2, tmp_path, shares_noise):
        assert added == ([number_and_gradients] * len(WHOLE) if shares_noise else [])


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(HyperparameterError, match=r"num_groups=3 does not divide the 4 batches of an update \(2 ranks"):
        strategy_of(0, 2, num_groups=3).noise_samples(1, 0, 2)
    with pytest.raises(HyperparameterError, match=r"num_groups=3 puts batches of one of the 2 ranks.*divisor of 2"):
        strategy_of(0, 2, num_groups=3).add_noise_group_([torch.ones(1)])
    with pytest.raises(HyperparameterError, match=r'mode="samples" needs num_groups that divides the 4 ranks, not 3'):
        _ = strategy_of(0, 4, mode="samples", num_groups=3).distributed_sampler_kwargs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "sample"}, "mode='sample' is unknown. Choose from data, samples"),
        ({"num_groups": 0}, "num_groups=0 must be at least 1"),
        ({"bucket_mib": 0}, "bucket_mib=0 must be above 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        BayesDDPStrategy(**arguments)


@pytest.mark.parametrize(
    ("mode", "groups", "expected"),
    [
        ("data", None, [(4, 0), (4, 1), (4, 2), (4, 3)]),
        ("data", 2, [(4, 0), (4, 1), (4, 2), (4, 3)]),
        ("samples", None, [(1, 0)] * 4),
        ("samples", 2, [(2, 0), (2, 1), (2, 0), (2, 1)]),
    ],
)
def test_which_part_of_the_data_a_rank_sees(mode, groups, expected):
    parts = [strategy_of(rank, 4, mode=mode, num_groups=groups).distributed_sampler_kwargs for rank in range(4)]
    assert [(part["num_replicas"], part["rank"]) for part in parts] == expected


def test_the_strategy_is_known_by_its_name():
    strategy = Trainer(strategy="bayes_ddp", devices=1, accelerator="cpu", logger=False).strategy
    assert type(strategy) is BayesDDPStrategy


# -- two processes and one ---------------------------------------------------------------------------------------------


def refusal(callback, batches, **options):
    try:
        train(callback, batches, **options)
    except RankError as error:
        return str(error)
    return "nothing"


def skipping(rank):
    """One rank meets NaN in its fourth batch."""
    callback, broken = CALLBACKS["VOGN"](), 3 if rank == 1 else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = train(callback, share(rank, 2), normalised=True, broken=broken, max_epochs=1, **on_ranks(2))
    said = [str(warning.message) for warning in said if "non-finite" in str(warning.message)]
    return {"state": state, "counts": [callback.optimizer.skipped_steps, callback.optimizer.num_updates], "said": said}


def on_two_ranks(rank):
    spread = {"strategy": BayesDDPStrategy("samples"), "devices": 2}
    shuffled = DataLoader(blobs(), batch_size=8, shuffle=True)
    uneven = [rows[:3] if rank == 0 else rows[3:] for rows in WHOLE]
    last_uneven = [*share(rank, 2)[:-1], [40] if rank == 0 else [44, 45]]
    vogn, small = CALLBACKS["VOGN"], BayesDDPStrategy(bucket_mib=1e-4)
    inferred = vogn(mc_samples=2, num_data=None)
    return {
        "shared noise": train_family(rank, 2, 1, 1, 2),
        "own noise": train_family(rank, 2, 2, 1, 2),
        "samples": train(inferred, data=shuffled, **spread),
        "inferred N": inferred.optimizer.param_groups[0]["posterior"]["num_data"],
        "uneven": train(vogn(), uneven, **on_ranks(2, num_groups=1)),
        "last batch": train(vogn(), last_uneven, **on_ranks(2, num_groups=1)),
        "one bucket": train(vogn(), share(rank, 2), **on_ranks(2)),
        "buckets": train(vogn(), share(rank, 2), **{**on_ranks(2), "strategy": small}),
        "bytes": small.reduced_bytes,
        "skipping": skipping(rank),
        "refused": refusal(vogn(num_data=48 + rank, damping=0.5 * rank), share(rank, 2), **on_ranks(2)),
        "refused by ddp": refusal(
            vogn(), share(rank, 2)[: 6 - rank], strategy="ddp", devices=2, use_distributed_sampler=False
        ),
    }


def in_one_process(rank):
    data = DataLoader(blobs(), batch_size=8, sampler=DistributedSampler(blobs(), 1, 0, shuffle=True, seed=0))
    return {
        "shared noise": train_family(rank, 1, 1, 2, 2),
        "own noise": train_family(rank, 1, 2, 2, 2),
        "samples": train(CALLBACKS["VOGN"](mc_samples=4), data=data, **on_ranks(1)),
        "uneven": train(CALLBACKS["VOGN"](), WHOLE, **on_ranks(1)),
        "last batch": train(CALLBACKS["VOGN"](), [*WHOLE[:-1], [40, 44, 45]], **on_ranks(1)),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_on_ranks(in_one_process, 1, tmp_path_factory.mktemp("one"))[0]


def learned(state):
    """Without BatchNorm's running statistics, which average over a batch's shares on ranks and over time in turns."""
    return {name: value for name, value in state.items() if not name.startswith(("net.1.running", "net.1.num_"))}


noise = pytest.mark.parametrize("noise", ["shared noise", "own noise"])
each = pytest.mark.parametrize("name", CALLBACKS)


@pytest.mark.ddp
@noise
@each
def test_ranks_are_identical_bit_for_bit(ranks, noise, name):
    """Weights, curvature, momentum, Kronecker factors and BatchNorm's running statistics."""
    assert_same_bits(ranks[1][noise][name], ranks[0][noise][name])


@pytest.mark.ddp
@noise
@each
def test_one_device_takes_the_place_of_two(ranks, alone, noise, name):
    """With the shares of a batch as micro-batches, and the same noise groups."""
    assert_close(learned(ranks[0][noise][name]), learned(alone[noise][name]), rtol=0, atol=1e-6)


@pytest.mark.ddp
@each
def test_noise_groups_matter(ranks, name):
    shared, own = (ranks[0][noise][name]["net.0.weight"] for noise in ("shared noise", "own noise"))
    assert float((shared - own).abs().max()) > 1e-4


@pytest.mark.ddp
def test_two_samples_on_each_of_two_ranks_are_four_samples_of_one_batch(ranks, alone):
    """Through the sampler that Lightning injects, which shuffles; N counts an example once."""
    assert_same_bits(ranks[1]["samples"], ranks[0]["samples"])
    assert_close(ranks[0]["samples"], alone["samples"], rtol=0, atol=1e-6)
    assert ranks[0]["inferred N"] == 48


@pytest.mark.ddp
@pytest.mark.parametrize("name", ["uneven", "last batch"])
def test_ranks_count_by_their_examples(ranks, alone, name):
    """3 and 5 examples in every batch; 1 and 2 in the last one."""
    assert_close(ranks[0][name], alone[name], rtol=0, atol=1e-6)


@pytest.mark.ddp
def test_buckets_change_nothing(ranks):
    """104 bytes hold 26 of 104 numbers: the loss, gradients and curvatures of 51 weights, and the rank's weight."""
    assert_close(ranks[0]["buckets"], ranks[0]["one bucket"], rtol=0, atol=1e-6)
    weights = FEATURES * 6 + 6 + 6 * CLASSES + CLASSES
    assert ranks[0]["bytes"] == 4 * (1 + 2 * weights + 1)


@pytest.mark.ddp
def test_a_batch_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks):
    for rank in ranks:
        assert rank["skipping"]["counts"] == [1, 5]
        assert "Update 4 has a non-finite gradient or curvature" in rank["skipping"]["said"][0]
        assert all(value.isfinite().all() for value in rank["skipping"]["state"].values())
    assert_same_bits(ranks[1]["skipping"]["state"], ranks[0]["skipping"]["state"])


@pytest.mark.ddp
def test_ranks_that_want_something_else_are_refused_at_the_start(ranks):
    for rank in ranks:
        assert "num_data is 48 on rank 0, but 49 on rank 1" in rank["refused"]
        assert "damping is 0.0 on rank 0, but 0.5 on rank 1" in rank["refused"]
        assert "the number of batches is 6 on rank 0, but 5 on rank 1" in rank["refused by ddp"]


def many_steps(rank, world_size):
    """204 updates, each rank with noise of its own; one device of two, two of four."""
    return train_family(rank, world_size, None, 1, 34)


def few_steps(rank, world_size, groups):
    """In double precision: BatchNorm over shares of two examples divides by small numbers."""
    return train_family(rank, world_size, groups, 4 // world_size, 2, precision="64-true")


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_are_identical_after_two_hundred_steps(world_size, tmp_path):
    first, *others = run_on_ranks(many_steps, world_size, tmp_path, world_size)
    for name in CALLBACKS:
        for other in others:
            assert_same_bits(other[name], first[name])


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_four_two_and_one_devices_with_the_same_noise_groups_agree(groups, tmp_path):
    four, two, one = (run_on_ranks(few_steps, size, tmp_path, size, groups)[0] for size in (4, 2, 1))
    for name in CALLBACKS:
        assert_close(learned(two[name]), learned(four[name]), rtol=0, atol=1e-6)
        assert_close(learned(one[name]), learned(four[name]), rtol=0, atol=1e-6)

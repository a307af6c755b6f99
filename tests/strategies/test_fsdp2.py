"""FSDP2 on two gloo ranks: the ranks' rows take the update of one process with the whole batch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from torch import nn

import lightning_bayes
from lightning_bayes.errors import UnsupportedTrainingError

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("fully_shard came with torch 2.6", allow_module_level=True)

pytestmark = pytest.mark.ddp
RANKS, UPDATES = 2, 3


class Network(nn.Module):
    """Tensors of odd sizes and of one row; where large, a table that is drawn in two parts, and a layer in one."""

    def __init__(self, large=False):
        super().__init__()
        torch.manual_seed(0)
        rows, width, inner = (701, 400, 173) if large else (301, 4, 7)
        self.table = nn.Embedding(rows, width)
        self.middle = nn.Sequential(nn.Linear(width, inner), nn.Tanh())
        self.norm, self.scale = nn.LayerNorm(inner), nn.Parameter(torch.ones(1))
        self.head = nn.Linear(inner, 3)
        self.double()

    def forward(self, rows):
        return self.head(self.norm(self.middle(self.table(rows))) * self.scale)


def batches(first=0):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, (2, 8), generator=generator) for _ in range(UPDATES)]
    return [(99 * rows + 7 * i, targets) for i, (rows, targets) in enumerate(drawn)][first:]


def sharded(net=None):
    from torch.distributed.device_mesh import init_device_mesh

    net, mesh = net or Network(), init_device_mesh("cpu", (RANKS,))
    fsdp.fully_shard(net.middle, mesh=mesh)
    return fsdp.fully_shard(net, mesh=mesh)


CASES = {  # method, its arguments, how it is trained
    "IVON": ("IVON", {"init_precision": 500.0}, {"clips": True}),
    "IVON without start": ("IVON", {"betas": (0.9, 0.99), "mc_samples": 2}, {"closure": True}),
    "IVON, weights alone": ("IVON", {"init_precision": 500.0, "bayesian": "weight", "prior_mean": "initial"}, {}),
    "Vadam": ("Vadam", {}, {"passes": 2, "reduction": "sum", "evaluates": True}),
    "NoisyAdam": ("NoisyAdam", {"prior_precision": 3.0}, {}),
    "BBB": ("BBB", {"init_precision": 500.0}, {}),
}


def optimizer_of(case, net):
    name, arguments, _ = CASES[case]
    return getattr(lightning_bayes, name)(net, lr=0.02, num_data=64, **arguments)


def train(net, optimizer, data, part, reduction="mean", evaluates=False, clips=False, closure=False, passes=1):
    def loss(rows, targets):
        return F.cross_entropy(net(part(rows)), part(targets), reduction=reduction)

    def backward(rows, targets):
        optimizer.zero_grad()
        found = loss(rows, targets)
        found.backward()
        return found

    for batch in data:
        if closure:
            optimizer.step(lambda batch=batch: backward(*batch))
            continue
        for sample in range(passes):
            with optimizer.sampled_params(sample):
                loss(*batch).backward()
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()
        if evaluates:  # a root keeps its gathered parameters after a forward without backward
            with torch.no_grad(), optimizer.sampled_params():
                net(part(batch[0]))
                net(part(batch[0]))


def numbers(optimizer):
    found = optimizer.posterior()
    return {"mean": dict(found.mean), "precision": dict(found.precision)}


def train_rows(rank):
    torch.manual_seed(rank)
    found = {}
    for case, (_, _, options) in CASES.items():
        net = sharded()
        optimizer = optimizer_of(case, net)
        train(net, optimizer, batches(), lambda tensor: tensor.chunk(RANKS)[rank], **options)
        found[case] = numbers(optimizer)
    return found


def test_rows_on_two_ranks_take_the_update_of_one_process(tmp_path):
    found = run_on_ranks(train_rows, RANKS, tmp_path)
    for case, (_, _, options) in CASES.items():
        net = Network()
        optimizer = optimizer_of(case, net)
        train(net, optimizer, batches(), lambda tensor: tensor, **options)
        for of_rank in found:
            torch.testing.assert_close(of_rank[case], numbers(optimizer), rtol=1e-9, atol=1e-11, msg=case)


def sample_rows(rank):
    net = sharded(Network(large=True))
    optimizer = optimizer_of("IVON", net)
    with torch.no_grad(), optimizer.sampled_params(3):
        sample = {name: param.full_tensor() for name, param in net.named_parameters()}
    held = sum(optimizer.state[net.table.weight][name].to_local().numel() for name in ("curvature", "momentum"))
    return {"sample": sample, "mean": {n: p.full_tensor() for n, p in net.named_parameters()}, "held": held}


def test_the_sample_is_that_of_one_process_bit_for_bit_and_the_mean_returns(tmp_path):
    found = run_on_ranks(sample_rows, RANKS, tmp_path)
    net = Network(large=True)
    optimizer = optimizer_of("IVON", net)
    mean = {name: param.detach().clone() for name, param in net.named_parameters()}
    with torch.no_grad(), optimizer.sampled_params(3):
        for of_rank in found:
            torch.testing.assert_close(of_rank["sample"], dict(net.named_parameters()), rtol=0, atol=0)
            torch.testing.assert_close(of_rank["mean"], mean, rtol=0, atol=0)
    assert sum(of_rank["held"] for of_rank in found) == 2 * net.table.weight.numel()  # s and m


def resume_rows(rank, path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    def part(tensor):
        return tensor.chunk(RANKS)[rank]

    options, found = StateDictOptions(full_state_dict=True, cpu_offload=True), {}
    for case in ("IVON", "Vadam"):
        net = sharded()
        optimizer = optimizer_of(case, net)
        train(net, optimizer, batches()[:2], part)
        weights, state = get_state_dict(net, optimizer, options=options)  # full on rank 0, empty elsewhere
        if rank == 0:
            torch.save({"weights": weights, "state": state}, f"{path}/{case}.pt")
        train(net, optimizer, batches(2), part)
        whole = numbers(optimizer)
        torch.distributed.barrier()
        saved = torch.load(f"{path}/{case}.pt", weights_only=True)
        other = sharded()
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(2)
        optimizer = optimizer_of(case, other)
        loaded = {"model_state_dict": saved["weights"], "optim_state_dict": saved["state"]}
        set_state_dict(other, optimizer, **loaded, options=options)
        train(other, optimizer, batches(2), part)
        found[case] = {"whole": whole, "resumed": numbers(optimizer)}
    return found


def test_a_full_state_dict_resumes_on_ranks_bit_for_bit_and_in_one_process(tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    for of_rank in run_on_ranks(resume_rows, RANKS, tmp_path, str(tmp_path)):
        for found in of_rank.values():
            torch.testing.assert_close(found["resumed"], found["whole"], rtol=0, atol=0)
    for case, found in of_rank.items():
        saved, net = torch.load(tmp_path / f"{case}.pt", weights_only=True), Network()
        net.load_state_dict(saved["weights"])
        optimizer = optimizer_of(case, net)
        set_optimizer_state_dict(net, optimizer, saved["state"], options=StateDictOptions(full_state_dict=True))
        train(net, optimizer, batches(2), lambda tensor: tensor)
        torch.testing.assert_close(numbers(optimizer), found["whole"], rtol=1e-9, atol=1e-11)


def fail_on_one_rank(rank):
    net = sharded()
    optimizer = optimizer_of("IVON", net)
    before, (rows, targets) = numbers(optimizer), batches()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with optimizer.sampled_params():
            (F.cross_entropy(net(rows), targets) * (float("inf") if rank else 1.0)).backward()
        optimizer.step()
    skipped = optimizer.skipped_steps
    try:
        with optimizer.sampled_params():
            F.cross_entropy(net(rows[rank:]), targets[rank:]).backward()
    except UnsupportedTrainingError as error:
        return {"before": before, "after": numbers(optimizer), "skipped": skipped, "message": str(error)}
    raise AssertionError("not refused")


def test_ranks_skip_an_update_together_and_refuse_different_numbers_of_examples(tmp_path):
    for found in run_on_ranks(fail_on_one_rank, RANKS, tmp_path):
        assert found["skipped"] == 1
        torch.testing.assert_close(found["after"], found["before"], rtol=0, atol=0)
        assert found["message"].startswith("One process has 7 examples in this pass and another has 8")


def train_under_fabric(rank):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(shard_over, data_parallel_size=RANKS, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    net = fabric.setup_module(Network())
    optimizer = fabric.setup_optimizers(optimizer_of("Vadam", net.module))
    for rows, targets in batches():
        with optimizer.sampled_params():
            fabric.backward(F.cross_entropy(net(rows.chunk(RANKS)[rank]), targets.chunk(RANKS)[rank]))
        optimizer.step()
    return numbers(optimizer)


def shard_over(net, mesh):
    return fsdp.fully_shard(net, mesh=mesh["data_parallel"])


def test_fabric_trains_rows_as_one_process(tmp_path):
    found = run_on_ranks(train_under_fabric, RANKS, tmp_path)
    net = Network()
    optimizer = optimizer_of("Vadam", net)
    for rows, targets in batches():
        with optimizer.sampled_params():
            F.cross_entropy(net(rows), targets).backward()
        optimizer.step()
    for of_rank in found:
        torch.testing.assert_close(of_rank, numbers(optimizer), rtol=1e-9, atol=1e-11)

"""Every optimizer and scheduler of torch in a training that is saved and resumed at every step.

The model has a head that nothing uses, a frozen layer, and an expert that is routed to late.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.states import assert_same
from torch.optim import lr_scheduler
from trainings import manager_of

STEPS = 4
_LATE = 2  # the first step that routes to the expert


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Columns amid a wider tensor: neither dense nor at the begin of its memory."""
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 3)
    return wide[..., 2:-1].copy_(tensor)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "channels_last": lambda one: (
        one.clone(memory_format=torch.channels_last) if one.ndim == 4 else one.clone()
    ),
    "transposed": _transposed,
    "offset": lambda one: torch.cat([torch.ones(3), one.flatten()])[3:].view_as(one),
    "strided": _strided,
}  # a parameter that is expanded has one memory for all elements: torch neither steps nor loads it


def lay_out(model: torch.nn.Module, layout: str) -> None:
    """Gives parameters of a plain model other strides."""
    for module in model.children():
        for key, one in list(module.named_parameters(recurse=False)):
            made = torch.nn.Parameter(LAYOUTS[layout](one.detach()), one.requires_grad)
            setattr(module, key, made)


class Net(torch.nn.Module):
    def __init__(self, seed: int, *, is_sparse: bool = False, is_image: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.is_image = is_image
        kinds: Any = torch.nn.Linear
        if is_image:
            kinds = lambda before, after: torch.nn.Conv2d(before, after, 3, padding=1)  # noqa: E731
        if is_sparse:
            kinds = lambda rows, columns: torch.nn.Embedding(rows, columns, sparse=True)  # noqa: E731
        self.first, self.second = kinds(6, 4), kinds(4, 4)
        self.expert, self.head = kinds(4, 4), kinds(4, 2)
        self.frozen = kinds(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, *, is_routed: bool) -> torch.Tensor:
        layers = [self.first, self.second, self.frozen, *[self.expert] * is_routed]
        if isinstance(self.first, torch.nn.Embedding):
            rows = x[:, 0].abs().mul(100).long()
            looked_up = [layer(rows % layer.num_embeddings) for layer in layers]
            return torch.stack(looked_up).prod(0)
        if self.is_image:
            x = x[:, :, None, None].expand(-1, -1, 3, 3)
        for layer in layers:
            x = layer(x)
        return x


class Case(NamedTuple):
    """An optimizer with its arguments, and a scheduler."""

    optimizer: str
    arguments: dict[str, Any]
    scheduler: str
    is_used_only: bool = False  # whether the optimizer has no parameter without gradients
    layout: str = "contiguous"  # of parameters

    def __str__(self) -> str:
        words = (f"{name}={value}" for name, value in self.arguments.items())
        layout = [self.layout] if self.layout != "contiguous" else []
        return "-".join((self.optimizer, *words, self.scheduler, *layout))

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        kind: type[torch.optim.Optimizer] = getattr(torch.optim, self.optimizer)
        return kind

    @property
    def needs_closure(self) -> bool:
        return inspect.signature(self.kind.step).parameters["closure"].default is inspect._empty


def optimizers() -> list[str]:
    """Returns the names of all that torch exports."""
    named = ((name, getattr(torch.optim, name)) for name in torch.optim.__all__)
    return [
        name
        for name, kind in named
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]


def schedulers() -> list[str]:
    """Returns the names of all that torch exports; what cannot be made is for the caller to see."""
    return [name for name in lr_scheduler.__all__ if name != "LRScheduler"]


def variants(name: str) -> Iterator[dict[str, Any]]:
    """Yields arguments of an optimizer: `foreach` and `fused` where it takes them, and others."""
    taken = inspect.signature(getattr(torch.optim, name)).parameters
    for arguments in (
        {"foreach": False}, {"foreach": True}, {"fused": True}, {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True}, {"centered": True}, {"amsgrad": True},
        {"weight_decay": 0.1}, {"maximize": True}, {"line_search_fn": "strong_wolfe"},
    ):  # fmt: skip
        if arguments.keys() <= taken.keys():
            yield arguments
    yield {}


class _Warmup:
    """A function of LambdaLR's that has a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9**epoch + self.calls / 100


def _momentum(optimizer: Any) -> bool:
    return bool({"momentum", "betas"} & optimizer.defaults.keys())


def _in_sequence(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _chained(optimizer: Any) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        lr_scheduler.LambdaLR(optimizer, _Warmup()),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": _chained,
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.05, 2, scale_fn=lambda x: 0.9**x, cycle_momentum=_momentum(o)
    ),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 0.05, total_steps=9, cycle_momentum=_momentum(o)
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": _in_sequence,
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
}


class Training:
    """One training of a case; `shard` makes of the model what is trained."""

    def __init__(self, case: Case, seed: int, shard: Callable[[Any], Any] | None = None) -> None:
        self.case = case
        is_sparse = case.optimizer == "SparseAdam"
        is_image = case.layout == "channels_last" and not is_sparse and case.optimizer != "Muon"
        self.model: Any = Net(seed, is_sparse=is_sparse, is_image=is_image)
        lay_out(self.model, case.layout)
        net: Any = self.model
        if shard is not None:
            self.model = shard(net)
        layers = [list(layer.parameters()) for layer in net.children()]
        if case.optimizer == "Muon":
            layers = [[one for one in layer if one.ndim == 2] for layer in layers]
        first, second, expert, head, frozen = layers
        groups = [{"params": first + head}, {"params": second + expert + frozen, "lr": 0.03}]
        if case.is_used_only:
            groups = [{"params": first}, {"params": second, "lr": 0.03}]
        arguments = {"lr": 0.05, **case.arguments}
        if case.optimizer == "LBFGS":
            kept = first + second if case.is_used_only else first + head + second + expert + frozen
            groups, arguments = [{"params": kept}], {**arguments, "max_iter": 4}
        self.optimizer: Any = case.kind(groups, **arguments)  # type: ignore[call-arg]
        self.scheduler = _MAKERS[case.scheduler](self.optimizer)

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler,
        }  # fmt: skip

    def train(self, step: int) -> None:
        x = torch.rand(4, 6, generator=torch.Generator().manual_seed(step))
        loss = torch.zeros(())

        def closure() -> torch.Tensor:
            nonlocal loss
            self.optimizer.zero_grad()
            loss = self.model(x, is_routed=step >= _LATE).square().mean()
            loss.backward()
            return loss

        if self.case.needs_closure:
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        has_metric = "metrics" in inspect.signature(self.scheduler.step).parameters
        self.scheduler.step(*[loss.item()] * has_metric)

    def train_to_the_end(self, step: int = 0) -> None:
        for later in range(step, STEPS):
            self.train(later)

    def everything(self) -> dict[str, Any]:
        """Returns weights, states and settings, as they are on this rank."""
        state = self.optimizer.state_dict()
        states = {number: dict(sorted(own.items())) for number, own in state["state"].items()}
        groups = [dict(sorted(group.items())) for group in state["param_groups"]]
        weights = dict(self.model.named_parameters())
        held = {"weights": weights, "states": dict(sorted(states.items())), "groups": groups}
        return {**_local(held), "strides": _strides(held["states"])}


def _local(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _local(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_local(one) for one in value]
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _strides(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strides(one) for key, one in value.items()}
    return value.stride() if type(value) is torch.Tensor else type(value).__name__


def check_unchanged(
    root: Path, case: Case, shard: Callable[[Any], Any] | None = None, *, is_whole: bool = True
) -> None:
    """Asserts that a training is what it is, however often it is saved, and wherever resumed.

    A new training and one that has trained resume before each step, or in turn (`is_whole=False`).
    """
    alone = Training(case, 0, shard)
    expected = []
    for step in range(STEPS):
        expected.append(alone.everything())
        alone.train(step)
    end = alone.everything()

    saved = Training(case, 0, shard)
    manager = manager_of(root)
    for step in range(STEPS):
        manager.save(step, **saved.parts)
        assert_same(expected[step], saved.everything(), f"save before step {step}")
        saved.train(step)
    assert_same(end, saved.everything(), "saved")

    for step in range(STEPS):
        fresh = Training(case, 1, shard)
        both = (("trained", saved), ("fresh", fresh))
        for name, training in both if is_whole else both[step % 2 :][:1]:
            manager.resume(tag=step, **training.parts)
            where = f"{name} resumed before step {step}"
            assert_same(expected[step], training.everything(), where)
            training.train_to_the_end(step)
            assert_same(end, training.everything(), f"{where}, at the end")

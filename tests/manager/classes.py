"""An optimizer with states of every class, and one that keeps more than DCP knows of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

TRANSPOSED = "transposed"


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class EveryClass(torch.optim.Optimizer):
    """All of its states take part in each step: a wrong one is another training.

    Whatever rank computes it, a plain state has the same bytes on all.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def _new(self, parameter: Any) -> dict[Any, Any]:
        full = torch.zeros(parameter.size())
        state: dict[Any, Any] = {
            "step": torch.zeros(()),
            "moment": torch.zeros_like(parameter),
            "low": torch.zeros_like(parameter, dtype=torch.bfloat16),
            "wide": torch.zeros_like(parameter, dtype=torch.float64),
            "whole": torch.zeros(parameter.size()),
            "row": torch.zeros(parameter.size(0)),
            "one": torch.zeros(1),
            "none": torch.zeros(0),
            "counts": torch.zeros(3, dtype=torch.int64),
            TRANSPOSED: full.t().contiguous().t() if full.ndim == 2 else full,
            "spread": torch.zeros(1).expand(3),
            "texts": {"0": torch.ones(2), "1": 2.0},
            "numbers": {0: torch.ones(2), 1: 2.0, -1: 3.0},
            "keys": {(1, "a"): 1.0, b"b": 2.0, None: 3.0, True: 4.0, 0.5: torch.ones(2)},
            "empty": {},
            "nested": {"deep": {"er": {}}, "pair": (1, 2)},
            "list": [{}, torch.ones(2), {"x": {}, "y": 1}, {}],
            "kinds": [1, 1.0, True, "1", None],
        }
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            state["replica"] = DTensor.from_local(full.clone(), mesh, [Replicate()])
            last = parameter.ndim - 1
            state["columns"] = torch.zeros_like(parameter).redistribute(mesh, [Shard(last)])
            state["norm"] = DTensor.from_local(torch.zeros(()), mesh, [Replicate()])
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, full = self.state[parameter], whole(parameter.grad)
                if not state:
                    state |= self._new(parameter)
                state["step"] += 1
                state["moment"].mul_(0.9).add_(parameter.grad)
                state["low"].add_(parameter.grad.to(torch.bfloat16))
                state["wide"].add_(parameter.grad.to(torch.float64))
                for name in ("whole", TRANSPOSED):
                    state[name].mul_(0.9).add_(full)
                state["row"].add_(full.reshape(full.size(0), -1).mean(1))
                state["one"].add_(full.norm())
                state["counts"][int(state["step"]) % 3] += 1
                state["spread"] = (state["spread"][:1] + 1).expand(3)
                for kind in ("texts", "numbers"):
                    key = "0" if kind == "texts" else 0
                    state[kind][key] *= 1.5
                state["keys"][None] += 1.0
                factor = state["texts"]["0"][0] + state["numbers"][-1] + state["keys"][None]
                if "replica" in state:
                    state["replica"].add_(DTensor.from_local(
                        full, parameter.device_mesh, [Replicate()]))  # fmt: skip
                    state["norm"].add_(1)
                    columns, mesh = state["columns"], parameter.device_mesh
                    columns.add_(parameter.grad.redistribute(mesh, columns.placements))
                parameter.sub_(state["moment"], alpha=group["lr"] / float(factor))


def described(value: Any) -> Any:
    """Returns classes, dtypes, shardings, strides, keys and values of what an optimizer holds."""
    if isinstance(value, torch.Tensor):
        local, more = value, ()
        if isinstance(value, DTensor):
            local, more = value.to_local(), (value.placements, value.device_mesh)
        strides = local.stride() if local.ndim > 1 else None
        return type(value).__name__, value.dtype, tuple(value.size()), strides, more, local.tolist()
    if isinstance(value, dict):
        return {(type(key), key): described(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [described(one) for one in value]
    return type(value), value


class Lookahead(torch.optim.Optimizer):
    """Shows another optimizer's state and groups, and has a state of its own beside them."""

    def __init__(self, inner: Any, key: str = "lookahead") -> None:
        self.inner, self.key, self.calls = inner, key, 0
        self.defaults = inner.defaults
        self.slow = {p: p.detach().clone() for g in inner.param_groups for p in g["params"]}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.calls += 1
        if self.calls % 2 == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self) -> Any:
        own = {"calls": self.calls, "slow": [one.clone() for one in self.slow.values()], 3: {}}
        return {**self.inner.state_dict(), self.key: own}

    def load_state_dict(self, state_dict: Any) -> None:
        own = state_dict[self.key]
        assert own[3] == {}
        self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.calls = own["calls"]
        for slow, saved in zip(self.slow.values(), own["slow"], strict=True):
            slow.copy_(saved)

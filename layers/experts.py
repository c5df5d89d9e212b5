"""Experts that differ from Mixtral's."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import kernels
from families.config import ModelConfig
from kernels.experts import Routes
from model import MLP, Experts


class SharedExperts(Experts):
    """Beside the chosen experts there is one that every token uses, maybe with a gate."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        H = config.hidden_size
        self.shared = MLP(H, config.shared_intermediate_size) if config.shared_intermediate_size else None
        self.shared_gate = nn.Linear(H, 1, bias=False) if self.shared and config.shared_gate else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.shared is not None:
            added = self.shared(x)
            if self.shared_gate is not None:
                added = kernels.sigmoid(self.shared_gate(x)) * added
            residual = added if residual is None else residual + added
        return super().forward(x, residual)


class WeighedExperts(Experts):
    """The weights of the chosen experts are multiplied by something."""

    def weighed(self, weights: Tensor, ids: Tensor) -> Tensor:
        """The weights of the experts of these numbers, both [M, k], times their factors."""
        raise NotImplementedError

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super().route(x)
        return self.weighed(weights, ids), ids

    def routes(self, x: Tensor) -> Routes:
        routes = super().routes(x)
        return routes._replace(weights=self.weighed(routes.weights, routes.ids))


class SigmoidExperts(WeighedExperts, SharedExperts):
    """A sigmoid weighs the experts, and a correction is added for the choice alone."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.correction = nn.Parameter(torch.zeros(config.num_local_experts))
        self.multiplier = config.experts_multiplier

    def logits(self, x: Tensor) -> Tensor:
        """The chosen experts get the logarithms of their sigmoids, and the others -inf."""
        logits = self.router(x)
        scores = logits.float().sigmoid() + self.correction
        others = scores.sort(dim=-1, descending=True, stable=True).indices[:, self.per_token :]
        return F.logsigmoid(logits).scatter(-1, others, -math.inf)

    def weighed(self, weights: Tensor, ids: Tensor) -> Tensor:
        return weights if self.multiplier == 1 else weights * self.multiplier


class BiasedExperts(Experts):
    """Router and experts have biases."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        E, H, I = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.router = nn.Linear(H, E, bias=True)
        self.gate_up_bias, self.down_bias = (nn.Parameter(torch.empty(E, size)) for size in (2 * I, H))

    def packed(self, x: Tensor, routes: Routes, residual: Tensor | None) -> Tensor:
        return super().packed(x, routes, residual, (self.gate_up_bias, self.down_bias))

    def few(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        up = torch.einsum("mkih,mh->mki", self.gate_up[index], x) + self.gate_up_bias[index]
        rows = torch.einsum("mkhi,mki->mkh", self.down[index], kernels.gate(up, self.gate)) + self.down_bias[index]
        return (rows * weight[..., None]).sum(1)

    def hidden(self, x: Tensor, e: int) -> Tensor:
        return kernels.gate(F.linear(x, self.gate_up[e], self.gate_up_bias[e]), self.gate)

    def expert(self, x: Tensor, e: int) -> Tensor:
        return F.linear(self.hidden(x, e), self.down[e], self.down_bias[e])

"""What parameters and thresholds of a new policy start as."""

from __future__ import annotations

import torch
from torch import nn

from .attention import RMSNorm
from .kda import HeadNorm, KimiDeltaAttention, ShortConv
from .moe import Experts, Router
from .value import ValueHead
from .vision import PositionTable

QUERIES = ("self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj")


@torch.no_grad()
def init_weights(module: nn.Module, std: float) -> None:
    """Set what the ``module`` itself holds, after the modules in it; matrices are normal with
    ``std``."""
    if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding | Router | PositionTable):
        module.weight.normal_(0, std)
    elif isinstance(module, Experts):
        for weight in (module.w1, module.w2, module.w3):
            weight.normal_(0, std)
    elif isinstance(module, ShortConv):
        bound = module.weight.shape[-1] ** -0.5
        module.weight.uniform_(-bound, bound)
    elif isinstance(module, RMSNorm | HeadNorm):
        module.weight.fill_(1)
    elif isinstance(module, KimiDeltaAttention):
        module.init_gate()
    elif isinstance(module, ValueHead):
        module.summary.weight.zero_()
        module.summary.bias.zero_()
    if isinstance(module, Router):
        module.e_score_correction_bias.zero_()
    # queries of the mixture over depth start at zero, a plain average (arXiv:2603.15031)
    for name, child in module.named_children():
        if name in QUERIES and isinstance(child, nn.Linear):
            child.weight.zero_()

"""Mixture of experts: routing, Quantile Balancing statistics, SiTU-GLU, grouped experts, and the
4-bit format of published experts."""

from .experts import grouped_experts, in_expert_order, naive_experts
from .histogram import Counts, QuantileHistogram
from .mxfp4 import mxfp4_decode, mxfp4_encode, mxfp4_rounded
from .route import mixing_weights, route
from .router import naive_router, router
from .situ import naive_situ_glu, situ_glu

__all__ = [
    "Counts",
    "QuantileHistogram",
    "grouped_experts",
    "in_expert_order",
    "mixing_weights",
    "mxfp4_decode",
    "mxfp4_encode",
    "mxfp4_rounded",
    "naive_experts",
    "naive_router",
    "naive_situ_glu",
    "route",
    "router",
    "situ_glu",
]

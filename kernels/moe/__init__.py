"""Mixture of experts: routing, Quantile Balancing statistics, SiTU-GLU, grouped experts, and the
4-bit format of published experts."""

from .experts import grouped_experts, naive_experts, situ_glu
from .histogram import Counts, QuantileHistogram
from .mxfp4 import mxfp4_decode, mxfp4_encode, mxfp4_rounded
from .route import mixing_weights, route
from .router import naive_router, router

__all__ = [
    "Counts",
    "QuantileHistogram",
    "grouped_experts",
    "mixing_weights",
    "mxfp4_decode",
    "mxfp4_encode",
    "mxfp4_rounded",
    "naive_experts",
    "naive_router",
    "route",
    "router",
    "situ_glu",
]

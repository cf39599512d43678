"""Mixture of experts: routing, Quantile Balancing statistics, SiTU-GLU and grouped experts."""

from .experts import grouped_experts, naive_experts, situ_glu
from .histogram import QuantileHistogram
from .route import route

__all__ = ["QuantileHistogram", "grouped_experts", "naive_experts", "route", "situ_glu"]

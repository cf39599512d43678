"""What ``farhorizon bench step`` is compared with: Kimi Linear of transformers, with the kernels of
flash-linear-attention, on a configuration that both sides have.

That has no mixture over depth, no latent experts, no gate on latent attention and SwiGLU. Their
decay has no bound, which their kernel takes a slower way for: theirs gets the bound of ours here,
inside of the kernel, as its authors offer it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..configs.errors import RunFailed, UserError, last_line
from ..policy import PolicyConfig
from .step_measure import Batch

KIMI_LINEAR = "kimi_linear"
PEERS = (KIMI_LINEAR,)
LOWER_BOUND = -5.0  # of the logarithm of a decay
ATTENTION = {  # of torch, which their layers call; its own choice need not be the fastest
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Heads as of the published Kimi Linear, for which their kernels need not be tuned anew everywhere.
SHARED_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 512,
}


def check_peers(names: tuple[str, ...]) -> None:
    """UserError for a name that no peer has."""
    for name in names:
        if name not in PEERS:
            raise UserError(f"peers: {name!r} is none; known: {', '.join(PEERS)}, or [] for none")


def missing() -> str | None:
    """The package without which the peer would run a plain loop, if it is not installed."""
    return None if installed("fla") else "flash-linear-attention"


def installed(package: str) -> bool:
    """Whether a package can be imported; a folder of its name is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def shared_config(config: PolicyConfig) -> PolicyConfig:
    """A policy of `SHARED_SIZES`, else as ``config``, without what Kimi Linear of transformers does
    not have: every fourth layer attends, the others are KDA."""
    layers = range(1, SHARED_SIZES["num_hidden_layers"] + 1)
    linear = {
        **(config.linear_attn_config or {}),
        "num_heads": SHARED_SIZES["num_attention_heads"],
        "use_full_rank_gate": False,
        "gate_lower_bound": LOWER_BOUND,
        "kda_layers": [n for n in layers if n % 4],
        "full_attn_layers": [n for n in layers if not n % 4],
    }
    return PolicyConfig.from_dict(
        {
            **config.to_dict(),
            **SHARED_SIZES,
            "attn_res_block_size": None,
            "routed_expert_hidden_size": None,
            "latent_moe_use_norm": False,
            "mla_use_output_gate": False,
            "mla_norm_eps": 1e-6,
            "hidden_act": "silu",
            "linear_attn_config": linear,
        }
    )


def kimi_linear(config: PolicyConfig, dtype: torch.dtype, device: str) -> Any:
    """Their model of the sizes of `shared_config`, untrained; parameters in ``dtype``."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    linear = config.linear_attn_config or {}
    layers = range(config.num_hidden_layers)
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "kv_lora_rank"),
        *("q_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "rms_norm_eps"),
        *("routed_scaling_factor", "max_position_embeddings", "initializer_range"),
    )
    theirs = KimiLinearConfig(
        **{name: getattr(config, name) for name in same},
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_token,
        n_shared_experts=config.num_shared_experts,
        linear_head_dim=linear["head_dim"],
        linear_num_heads=linear["num_heads"],
        linear_conv_kernel_dim=linear["short_conv_kernel_size"],
        layer_types=["full_attention" if config.is_mla(i) else "linear_attention" for i in layers],
        mlp_layer_types=["dense" if config.is_dense(i) else "sparse" for i in layers],
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    theirs._attn_implementation = "sdpa"
    with torch.device(device):
        model: Any = KimiLinearForCausalLM(theirs)
    model.set_experts_implementation("grouped_mm")
    return model.to(dtype).train()


@contextmanager
def bounded_decay(model: Any) -> Iterator[None]:
    """Meanwhile their layers hand the kernel of flash-linear-attention what the decay is made of,
    and its bound, as `farhorizon.kernels.kda.chunk_kda` has it."""
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    def bare(gate: Any, hidden: torch.Tensor) -> torch.Tensor:
        raw = gate.f_b_proj(gate.f_a_proj(hidden)).view(*hidden.shape[:2], -1, gate.head_dim)
        raw.gate = gate
        return raw

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: Any,
        beta: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = {n: v for n, v in options.items() if n in ("initial_state", "output_final_state")}
        return chunk_kda(
            *(query.contiguous(), key.contiguous(), value.contiguous(), g, beta),
            **options,
            A_log=g.gate.A_log.float().flatten(),
            dt_bias=g.gate.dt_bias.float(),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            safe_gate=True,
            lower_bound=LOWER_BOUND,
        )

    modeling: Any = sys.modules[type(model).__module__]
    gates = [m for m in model.modules() if type(m).__name__ == "KimiLinearForgetGate"]
    own = modeling.chunk_kimi_delta_attention
    try:
        for gate in gates:
            gate.forward = partial(bare, gate)
        modeling.chunk_kimi_delta_attention = call
        yield
    finally:
        modeling.chunk_kimi_delta_attention = own
        for gate in gates:
            del gate.forward


def attention_times(time: Callable[[], float]) -> dict[str, float]:
    """What ``time`` gives, which calls torch's attention, with each of `ATTENTION` that has kernels
    and memory for it. RunFailed, or what it lacked of memory, where none has."""
    times: dict[str, float] = {}
    last: RuntimeError | None = None
    for name, backend in ATTENTION.items():
        try:
            with sdpa_kernel(backend):
                times[name] = time()
        except RuntimeError as error:  # which torch raises for both
            print(f"{KIMI_LINEAR} without {name} attention: {last_line(error)}", flush=True)
            last = error
    if isinstance(last, torch.OutOfMemoryError) and not times:
        raise last
    if not times:
        raise RunFailed(f"{KIMI_LINEAR}: no attention of torch ({', '.join(ATTENTION)}) runs here")
    return times


class KimiSide:
    """A step of theirs on one document; each call is one, and gives the loss."""

    name = KIMI_LINEAR

    def __init__(self, model: Any, batch: Batch, lr: float = 1e-6) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def __call__(self) -> torch.Tensor:
        ids = self.batch.ids
        narrow = next(self.model.parameters()).dtype != torch.float32
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=not narrow):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

"""The policy: configuration, model, decode state, tokenizer and checkpoints."""

from .config import PolicyConfig
from .model import Policy, PolicyOutput
from .state import DecodeState

__all__ = ["DecodeState", "Policy", "PolicyConfig", "PolicyOutput"]

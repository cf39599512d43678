"""The policy: configuration, model, decode state, tokenizer and checkpoints."""

from .config import PolicyConfig
from .model import Policy, PolicyOutput
from .state import DecodeState
from .tokenizer import load_tokenizer

__all__ = ["DecodeState", "Policy", "PolicyConfig", "PolicyOutput", "load_tokenizer"]

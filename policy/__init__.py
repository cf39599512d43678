"""The policy: configuration, model, decode state, tokenizer and checkpoints."""

import os

# Trainers of the libraries below report their use to a public server unless told otherwise.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from .config import PolicyConfig
from .model import Policy, PolicyOutput
from .state import DecodeState
from .tokenizer import load_tokenizer

__all__ = ["DecodeState", "Policy", "PolicyConfig", "PolicyOutput", "load_tokenizer"]

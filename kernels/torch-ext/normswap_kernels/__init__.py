"""Fused RMSNorm and LayerNorm: Triton on GPUs, blocked torch on CPUs, one meaning on both.

Importing this package imports torch and nothing else; Triton is imported by the first call that runs it.
"""

from . import layers
from .backends import BACKENDS, BackendUnavailable, check_backend
from .ops import layer_norm, rms_norm

__all__ = ["BACKENDS", "BackendUnavailable", "check_backend", "layer_norm", "layers", "rms_norm"]

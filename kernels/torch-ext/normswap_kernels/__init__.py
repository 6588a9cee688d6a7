"""Fused row-wise normalisations: Triton on GPUs, blocked torch or compiled C++ on CPUs, one meaning on both.

Importing this package imports torch and nothing else; Triton is imported by the first call that runs it.
"""

from . import layers
from .backends import BACKENDS, BackendUnavailable, check_backend
from .fused import add_layer_norm, add_rms_norm, gated_rms_norm, rms_norm_quant
from .ops import layer_norm, rms_norm

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "add_layer_norm",
    "add_rms_norm",
    "check_backend",
    "gated_rms_norm",
    "layer_norm",
    "layers",
    "rms_norm",
    "rms_norm_quant",
]

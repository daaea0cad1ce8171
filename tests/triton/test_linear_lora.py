"""Linear layers: the oracles of tests/ops on each of the three ways that the kernels take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.memory import GuardedMemory
from ops.test_linear_lora import (  # collected here again, with the fixtures of this folder
    test_forward_and_every_gradient,
    test_no_dropout_is_bit_equal_to_p_zero,
    test_residual_and_down_projection_alone,
)

from quatrain.ops import triton_configs
from quatrain.ops.linear_lora import triton as linear

__all__ = [
    "test_forward_and_every_gradient",
    "test_no_dropout_is_bit_equal_to_p_zero",
    "test_residual_and_down_projection_alone",
]


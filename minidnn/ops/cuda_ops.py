"""The ops of the contract on CUDA, by name.

A call is `OPS[name](context, **arrays, **attributes)` and returns the bound launch: a function without arguments that
issues the op on the context's stream. Binding is slow (plans, kernels), launching is not. Convolutions take
`algorithm` and `workspace` (an address, 0 for none) as well.
"""

from __future__ import annotations

from collections.abc import Callable

from minidnn.ops import blas, cudnn_ops, map_ops, norm_ops, pool_ops
from minidnn.ops.kernels import Launcher

CONVOLUTIONS = ("conv2d_forward", "conv2d_backward_data", "conv2d_backward_filter")

OPS: dict[str, Callable[..., Launcher]] = {
    function.__name__: function
    for function in (
        cudnn_ops.conv2d_forward, cudnn_ops.conv2d_backward_data, cudnn_ops.conv2d_backward_filter,
        blas.linear_forward, blas.linear_backward_data, blas.linear_backward_filter, norm_ops.bias_backward,
        map_ops.relu_backward, map_ops.activation_forward, map_ops.activation_backward,
        map_ops.dropout_forward, map_ops.dropout_backward,
        pool_ops.max_pool2d_forward, pool_ops.max_pool2d_backward,
        pool_ops.avg_pool2d_forward, pool_ops.avg_pool2d_backward,
        pool_ops.adaptive_avg_pool2d_forward, pool_ops.adaptive_avg_pool2d_backward,
        norm_ops.batch_norm_forward, norm_ops.batch_norm_inference, norm_ops.batch_norm_backward,
        norm_ops.local_response_norm_forward, norm_ops.local_response_norm_backward,
        map_ops.softmax_forward, map_ops.softmax_backward, map_ops.cross_entropy_forward,
        map_ops.cross_entropy_backward, map_ops.mse_forward, map_ops.mse_backward,
        map_ops.sgd_update, map_ops.adam_update, map_ops.accumulate, map_ops.clip_factor,
        map_ops.layout, map_ops.add,
    )
} | {"cast": map_ops.layout}  # fmt: skip
"""Every op of the contract by name."""

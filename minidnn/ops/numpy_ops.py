"""The host's ops: NumPy, BLAS and compiled loops behind the names that every device implements.

A call is `OPS[name](**arrays, **attributes)`. Outputs are allocated by the caller and filled completely; nothing is
returned. Tensors are logically [N,C,H,W]; where they lie otherwise in memory their strides say so.
"""

from __future__ import annotations

from collections.abc import Callable

from minidnn.ops.host_activation import (
    activation_backward,
    activation_forward,
    dropout_backward,
    dropout_forward,
    relu_backward,
)
from minidnn.ops.host_conv import (
    ALGORITHMS,
    conv2d_backward_data,
    conv2d_backward_filter,
    conv2d_forward,
    workspace_bytes,
)
from minidnn.ops.host_dense import (
    add,
    bias_backward,
    cast,
    layout,
    linear_backward_data,
    linear_backward_filter,
    linear_forward,
)
from minidnn.ops.host_loss import (
    cross_entropy_backward,
    cross_entropy_forward,
    mse_backward,
    mse_forward,
    softmax_backward,
    softmax_forward,
)
from minidnn.ops.host_norm import (
    batch_norm_backward,
    batch_norm_forward,
    batch_norm_inference,
    local_response_norm_backward,
    local_response_norm_forward,
)
from minidnn.ops.host_pool import (
    adaptive_avg_pool2d_backward,
    adaptive_avg_pool2d_forward,
    avg_pool2d_backward,
    avg_pool2d_forward,
    max_pool2d_backward,
    max_pool2d_forward,
)
from minidnn.ops.host_update import accumulate, adam_update, clip_factor, sgd_update

__all__ = ["ALGORITHMS", "OPS", "workspace_bytes"]

OPS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        conv2d_forward, conv2d_backward_data, conv2d_backward_filter,
        linear_forward, linear_backward_data, linear_backward_filter, bias_backward,
        relu_backward, activation_forward, activation_backward, dropout_forward, dropout_backward,
        max_pool2d_forward, max_pool2d_backward, avg_pool2d_forward, avg_pool2d_backward,
        adaptive_avg_pool2d_forward, adaptive_avg_pool2d_backward,
        batch_norm_forward, batch_norm_inference, batch_norm_backward,
        local_response_norm_forward, local_response_norm_backward,
        softmax_forward, softmax_backward, cross_entropy_forward, cross_entropy_backward, mse_forward, mse_backward,
        sgd_update, adam_update, accumulate, clip_factor, cast, layout, add,
    )
}  # fmt: skip
"""Every op of the contract by name."""

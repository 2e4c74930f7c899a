"""Weight matrices for sampling: many products with few rows and no gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from novarl.kernels.products import can_pack, full_rows, pack

EVEN, GRAIN = 64, 32768
"""Each thread's part of an activation is a multiple of this: remainders that do not fill a vector are computed one by
one, with different bits; and the size up to which PyTorch uses one thread."""


class Matrix:
    """A weight [N, K]: x [R, K] to x @ weight.T [R, N], with fused operations."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._turned = weight.t()

    def rows(self, count: int) -> int:
        """The padded row count for `count` rows; the contents of padding rows do not matter."""
        return count

    def times(self, x: Tensor) -> Tensor:
        """x @ weight.T."""
        return torch.mm(x, self._turned)

    def opened(self, x: Tensor) -> Tensor:
        """silu(x @ weight.T)."""
        if x.device.type != "cpu":
            return F.silu(self.times(x), inplace=True)
        rows, width = x.shape[0], self._weight.shape[0]
        size = rows * width
        together = EVEN * max(1, min(torch.get_num_threads(), -(-size // GRAIN)))
        room = x.new_empty(-(-size // together) * together)
        found = torch.mm(x, self._turned, out=room[:size].view(rows, -1))
        F.silu(room, inplace=True)
        return found

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """(x @ weight.T) * gate."""
        return self.times(x).mul_(gate)

    def added(self, x: Tensor, total: Tensor) -> Tensor:
        """total + x @ weight.T, in the dtype of `total`, which may be overwritten."""
        if total.dtype == x.dtype:
            return total.addmm_(x, self._turned)
        return total.add_(self.times(x))


SOON = 1 << 20
"""Weight elements read by products before the weight is packed. Around here, converting a small weight to oneDNN's
layout in every product has cost as much as a packed copy."""


class PackedMatrix(Matrix):
    """A weight in oneDNN's internal layout, which avoids converting it in every product; activations and residuals are
    fused. A small weight is copied only after frequent use; the bits are the same.

    From two rows on, the bits of a row do not depend on the other rows.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.detach().contiguous())
        self._read = 0

    def rows(self, count: int) -> int:
        return full_rows(count, 16)

    def times(self, x: Tensor) -> Tensor:
        return self._product(x, "none")

    def opened(self, x: Tensor) -> Tensor:
        return self._product(x, "swish")

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._with(x, gate, "mul")

    def added(self, x: Tensor, total: Tensor) -> Tensor:
        return self._with(x, total, "add") if total.dtype == x.dtype else total.add_(self.times(x))

    def _packed(self) -> Tensor:
        """The weight for the next product."""
        if not self._weight.is_mkldnn:
            self._read += self._weight.numel()
            if self._read > SOON:
                self._weight = pack(self._weight)
        return self._weight

    def _product(self, x: Tensor, activation: str) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed(), None, activation, [], "")
        return found

    def _with(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed(), None, how)
        return found


def as_matrix(weight: Tensor) -> Matrix:
    """The weight in the fastest form for this machine: a copy, or the weight itself."""
    return PackedMatrix(weight) if can_pack(weight) else Matrix(weight)

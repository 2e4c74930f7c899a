"""A device that is this CPU in disguise: `python disguised.py COMMANDS.json disguised` runs novarl's commands on it.

Its tensors hold their numbers in tensors of the CPU, and every operator that mixes the two kinds fails as it would on a
GPU: so do `numpy()` and indexing what is on the CPU by what is not. Nothing here is fast, and no kernel is tried.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "disguised"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
# Parameters keep their identity when they move, as from a CPU to a GPU: tied ones stay tied.
torch.__future__.set_swap_module_params_on_conversion(True)

aten = torch.ops.aten
CROSS = {aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default}
"""What may see tensors of both devices."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")


class There(Tensor):
    """A tensor of the device; `held` has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        place = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), device=DEVICE, **place)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = There(self.held.clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        return memo.setdefault(id(self), copied)

    def tolist(self) -> Any:
        return self.held.tolist()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu()")

    __array__ = numpy


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator, where its tensors are."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [leaf for leaf in leaves if isinstance(leaf, There)]
    asked = kwargs.get("device")
    if there and func not in CROSS:
        indexing = func.overloadpacket.__name__ in INDEXING
        for leaf in leaves:
            number = leaf.dim() == 0 or (indexing and leaf is not args[0] and not leaf.is_floating_point())
            if not (isinstance(leaf, There) or number) or (indexing and not isinstance(args[0], There)):
                raise RuntimeError(f"Expected all tensors to be on the same device: {func} of cpu and {DEVICE}")
    found = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    if func is aten.copy_.default:
        return args[0]
    if func is aten._local_scalar_dense.default:
        return found
    stays = bool(there) if asked is None or func is not aten._to_copy.default else False
    if not stays and not (asked is not None and torch.device(asked).type == NAME):
        return found
    known = {id(leaf.held): leaf for leaf in there}
    return tree_map(lambda x: (known[id(x)] if id(x) in known else There(x)) if isinstance(x, Tensor) else x, found)


def _plain(x: Any) -> Any:
    if isinstance(x, There):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


class Disguise(TorchDispatchMode):
    """Within it tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> There:
    return There(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> There:
    return There(torch.empty(size, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _plain(target).copy_(_plain(source))
    return target


def _in_16_bits(operator: Any) -> Callable[..., Any]:
    def lower(x: Any) -> Any:
        is_wide = isinstance(x, Tensor) and x.dtype == torch.float32
        return x.to(torch.get_autocast_dtype(NAME)) if is_wide else x

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lower, (args, kwargs))
        with torch.autocast(NAME, enabled=False):
            return operator(*args, **kwargs)

    return call


# What C++ asks of a device before Python sees the tensor, and what autocast does there.
LIBRARY, EVERY = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
EVERY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name in PRODUCTS:
    LIBRARY.impl(_name, _in_16_bits(getattr(aten, _name).default), "AutocastPrivateUse1")
type(torch.disguised).get_amp_supported_dtype = lambda self: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]


def mixes(device: torch.device) -> list[str]:
    """Which of the things fail that a GPU refuses."""
    here, there = torch.ones(3), torch.ones(3, device=device)
    where = torch.zeros(1, dtype=torch.int64, device=device)
    tried: dict[str, Callable[[], Any]] = {
        "sum": lambda: here + there,
        "into": lambda: there.add_(here),
        "index": lambda: here[where],
        "gather": lambda: there.gather(0, where.cpu()),
        "put": lambda: here.__setitem__(where, 1.0),
        "cat": lambda: torch.cat([here, there]),
        "numpy": lambda: there.numpy(),
        "select": lambda: there.index_select(0, where.cpu()),
    }
    failed = []
    for name, function in tried.items():
        try:
            function()
        except (RuntimeError, TypeError):
            failed.append(name)
    return failed


def main(path: str, device: str) -> None:
    """Run the commands there (or as they are, on the CPU), and write what became of each beside them."""
    from novarl.run import machine

    chosen = DEVICE if device == NAME else torch.device("cpu")
    machine.pick_device = lambda name: chosen
    from novarl.cli import main as novarl

    commands: list[list[str]] = json.loads(Path(path).read_text())
    with Disguise() if device == NAME else nullcontext():
        found = {"mixes": mixes(chosen)}
        found |= {"codes": [novarl(words) for words in commands]}
    Path(path).with_suffix(".found").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

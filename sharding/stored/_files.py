"""Parameters in files, read when they are encoded: one array of a stack at a time."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding._types import Tree

Index = tuple[int, ...]


class Lazy:
    """An array that is somewhere else, as in a file, and is read when it is needed.

    Args:
      shape: of the array.
      dtype: of its elements.
      read: what reads the array at some first indices, ``()`` for all of it.

    Example:
      >>> import numpy as np
      >>> from sharding import stored
      >>> table = np.memmap("/dev/zero", np.int8, "r", shape=(4, 2))
      >>> lazy = stored.Lazy(table.shape, table.dtype, lambda index: table[index])
      >>> lazy.T.shape, lazy.T[0].tolist()
      ((2, 4), [0, 0, 0, 0])
    """

    def __init__(self, shape: Sequence[int], dtype: Any, read: Callable[[Index], Any]):
        self.shape, self.dtype, self._read = tuple(shape), jnp.dtype(dtype), read

    def __getitem__(self, index: int | Index) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        found = np.asarray(self._read(index))
        if found.shape != self.shape[len(index) :]:
            raise ValueError(
                f"an array of shape {self.shape} was read at {index}, and gave {found.shape}. Give "
                "Lazy the shape of what its function reads."
            )
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[()], dtype=dtype, copy=copy)

    @property
    def T(self) -> "Lazy":
        """With its dims in reverse: files of PyTorch have a matrix as (columns, rows)."""
        return Lazy(self.shape[::-1], self.dtype, lambda index: self[()].T[index])


def stack(arrays: Sequence[Any]) -> Lazy:
    """Arrays of the same shape, such as one of each layer, as one.

    Args:
      arrays: in host memory, or read when they are needed.

    Raises:
      ValueError: if there are none, or their shapes or dtypes differ.

    Example:
      >>> import numpy as np
      >>> from sharding import stored
      >>> stored.stack([np.zeros((2, 3)), np.ones((2, 3))])[1, 0].tolist()
      [1.0, 1.0, 1.0]
    """
    kinds = {(tuple(x.shape), jnp.dtype(x.dtype)) for x in arrays}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype}{list(shape)}" for shape, dtype in kinds)) or "none"
        raise ValueError(f"stack takes arrays of one shape and dtype, got {found}.")
    ((shape, dtype),) = kinds

    def read(index: Index) -> Any:
        if index:
            return arrays[index[0]][index[1:]]
        return np.stack([np.asarray(x[()]) for x in arrays])

    return Lazy((len(arrays), *shape), dtype, read)


def safetensors(*paths: str | os.PathLike[str]) -> dict[str, Lazy]:
    """The arrays of safetensors files, by their names, of which nothing is read yet.

    Args:
      paths: of the files, as of all parts of a model.

    Raises:
      ImportError: without the package safetensors.
      ValueError: if two files have an array of the same name.

    Example:
      >>> import numpy as np, pathlib, safetensors.numpy, tempfile
      >>> from sharding import stored
      >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
      >>> weights = {f"layers.{i}.up.weight": np.ones((4, 2)) for i in range(3)}
      >>> safetensors.numpy.save_file(weights, path)
      >>> files = stored.safetensors(path)
      >>> stored.stack([files[f"layers.{i}.up.weight"].T for i in range(3)]).shape
      (3, 2, 4)
    """
    from safetensors import safe_open  # only who has such files needs it

    found: dict[str, Lazy] = {}
    for path in paths:
        file = safe_open(path, "numpy")
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            if name in found:
                raise ValueError(f"{name!r} is in several files, one of which is {path}.")
            header = file.get_slice(name)
            dtype = header[tuple(slice(0) for _ in header.get_shape()) or ...].dtype

            def read(index: Index, file: Any = file, name: str = name) -> Any:
                return file.get_slice(name)[index or ...]

            found[name] = Lazy(header.get_shape(), dtype, read)
    return found


def orbax(path: str | os.PathLike[str]) -> Tree:
    """The tree of an orbax checkpoint of parameters, of which nothing is read yet.

    A leaf is read as a whole, into host memory.

    Args:
      path: the folder that ``StandardCheckpointer`` or ``PyTreeCheckpointer`` wrote.

    Returns:
      A tree of ``Lazy``.

    Raises:
      ImportError: without the package orbax-checkpoint.

    Example:
      >>> import numpy as np, orbax.checkpoint as ocp, tempfile
      >>> from sharding import stored
      >>> folder = tempfile.mkdtemp() + "/saved"
      >>> ocp.PyTreeCheckpointer().save(folder, {"w": np.ones((2, 3), np.float32)})
      >>> stored.orbax(folder)["w"].shape
      (2, 3)
    """
    import orbax.checkpoint as ocp

    checkpointer = ocp.PyTreeCheckpointer()
    metadata: Any = checkpointer.metadata(path)
    is_array = lambda x: hasattr(x, "shape")  # noqa: E731
    leaves, treedef = jax.tree.flatten(metadata.item_metadata.tree, is_leaf=is_array)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    @functools.lru_cache(maxsize=1)  # the layers of a stack are asked for one by one
    def leaf(number: int) -> Any:
        items = [x if i == number else ocp.PLACEHOLDER for i, x in enumerate(types)]
        args = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(types)
        restore = ocp.args.PyTreeRestore(
            item=treedef.unflatten(items), restore_args=treedef.unflatten(args)
        )
        return jax.tree.leaves(checkpointer.restore(path, args=restore))[number]

    def lazy(number: int, x: Any) -> Lazy:
        return Lazy(x.shape, x.dtype, lambda index: leaf(number)[index])

    return treedef.unflatten(map(lazy, range(len(types)), types))

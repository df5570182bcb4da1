"""`Tensor`, `TensorDesc` (contract §9.5, §9.6) and `create_npu_tensors`.

Not for: tensors of caches (`test_kv_cache_manager.py`).
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from llm_datadist import DataType, LLMException, LLMStatusCode, Tensor, TensorDesc
from llm_datadist.data_type import dtype_to_np_dtype
from llm_datadist.original.tensors import create_npu_tensors
from memory import LE, TE, at, in_fresh_process, raising

NUMBERS = [kind for kind in DataType if kind not in (DataType.DT_BF16, DataType.DT_STRING)]


def made(kind: DataType, count: int = 6) -> np.ndarray:
    return np.arange(count).astype(dtype_to_np_dtype[kind]).reshape(2, count // 2)


def test_tensor_desc() -> None:
    shape = [1, 2]
    desc = TensorDesc(DataType.DT_FLOAT, shape)
    assert str(desc) == "TensorDesc(dtype=DataType.DT_FLOAT, shape=[1, 2])"
    desc.shape.append(3)
    shape.append(4)
    assert (desc.dtype, desc.shape) == (DataType.DT_FLOAT, [1, 2])
    tensor = Tensor(np.array([1.5, 2.0], dtype=np.float32))
    assert str(tensor) == "Tensor([1.5 2. ],tensor_desc=TensorDesc(dtype=DataType.DT_FLOAT, shape=[2]))"
    assert TensorDesc(DataType.DT_FLOAT, (3,)).shape == [3]
    assert TensorDesc(None, []).dtype is None  # type: ignore[arg-type]
    for args in [(0, [1]), (DataType.DT_FLOAT, 1), (DataType.DT_FLOAT, ["1"]), (DataType.DT_FLOAT, [True])]:
        with raising(TE):
            TensorDesc(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers(kind: DataType) -> None:
    array = made(kind)
    for desc in (None, TensorDesc(kind, [2, 3])):
        tensor = Tensor(array, desc)
        assert (tensor.tensor_desc.dtype, tensor.tensor_desc.shape) == (kind, [2, 3])
        view, copied = tensor.numpy(), tensor.numpy(copy=True)
        assert view.dtype == copied.dtype == array.dtype
        assert np.shares_memory(view, array)
        assert not np.shares_memory(copied, array)
        assert np.array_equal(view, array)
        assert np.array_equal(copied, array)
        again = Tensor(tensor)
        assert np.shares_memory(again.numpy(), array)
        assert again.tensor_desc is tensor.tensor_desc


def test_brain_floats() -> None:
    """As in a test of the original: the bits of float16 1.875 are those of bfloat16 1.0."""
    tensor = Tensor(np.array([1.875], dtype=np.float16), TensorDesc(DataType.DT_BF16, [1]))
    for copy in (False, True):
        wide = tensor.numpy(copy)
        assert (wide.dtype, wide.tolist()) == (np.dtype(np.float32), [1.0])
    bits = np.array([0x0000, 0x8000, 0x3F80, 0xBF80, 0x4049, 0x7F80, 0x0001], dtype=np.uint16)
    expected = [0.0, -0.0, 1.0, -1.0, 3.140625, float("inf"), 2.0**-133]
    wide = Tensor(bits.view(np.float16), TensorDesc(DataType.DT_BF16, [7])).numpy()
    assert wide.tolist() == expected
    assert np.signbit(wide[1])
    (shown,) = create_npu_tensors([7], DataType.DT_BF16, [bits.ctypes.data])  # the bits themselves
    assert (shown.dtype, shown.tolist()) == (bits.dtype, bits.tolist())


def test_strings() -> None:
    for array in (np.array(["a", "bc"]), np.array([b"a", b"bc"])):
        for desc in (None, TensorDesc(DataType.DT_STRING, [2])):
            tensor = Tensor(array, desc)
            assert tensor.tensor_desc.dtype == DataType.DT_STRING
            with pytest.raises(RuntimeError, match="copy"):
                tensor.numpy()
            assert tensor.numpy(copy=True).tolist() == array.tolist()


def test_what_a_tensor_is_not_made_of() -> None:
    array = made(DataType.DT_FLOAT)
    for data, desc, expected in [
        *[(data, None, TypeError) for data in ([1, 2], None, True)],
        (array, "desc", TypeError),
        *[(bad, None, RuntimeError) for bad in (array.T, array[:, ::2], array.astype(complex), np.array([object()]))],
        (array, TensorDesc(DataType.DT_FLOAT, [3, 2]), RuntimeError),
        *[(array, TensorDesc(DataType[f"DT_{kind}"], [2, 3]), RuntimeError) for kind in ("INT32", "STRING", "BF16")],
    ]:
        with pytest.raises(expected) as caught:
            Tensor(data, desc)  # type: ignore[arg-type]
        assert not isinstance(caught.value, LLMException)
    for copy in (1, None, "x"):
        with raising(TE):
            Tensor(array).numpy(copy)  # type: ignore[arg-type]


def test_there_are_no_native_handles() -> None:
    for call in (lambda: Tensor(12345), lambda: Tensor.from_tensor_tuple((12345, 0, [1]))):
        with pytest.raises(LLMException, match="native handles") as caught:
            call()
        assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.mark.parametrize("kind", NUMBERS)
def test_arrays_over_addresses(kind: DataType) -> None:
    owners = [made(kind), made(kind) + 1 if kind != DataType.DT_BOOL else made(kind)]
    addrs = [owner.ctypes.data for owner in owners]
    for dtype in (kind, dtype_to_np_dtype[kind], np.dtype(dtype_to_np_dtype[kind])):
        for shape in ([2, 3], (2, 3), (6,)):
            views = create_npu_tensors(shape, dtype, addrs)
            assert [view.ctypes.data for view in views] == addrs
            for view, owner in zip(views, owners):
                assert (view.shape, view.dtype) == (tuple(shape), owner.dtype)
                assert np.array_equal(view, owner.reshape(shape))
                assert not view.flags.owndata
    (view,) = create_npu_tensors((6,), kind, addrs[:1])
    view[5] = 1
    assert owners[0][1, 2] == 1


def test_unusable_arguments_and_memory_that_is_not_there_are_refused() -> None:
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 4 * page) as held:
        buffer = (ctypes.c_ubyte * 1).from_buffer(held)
        address = ctypes.addressof(buffer)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address + 2 * page), page, 1) == 0
        (view,) = create_npu_tensors([2 * page], DataType.DT_UINT8, [address])
        view[:] = 7
        assert at(address, 2 * page).tolist() == [7] * 2 * page
        for wrong in (None, "no such dtype", complex, object(), DataType.DT_STRING):
            with raising(TE):
                create_npu_tensors([1], wrong, [address])  # type: ignore[arg-type]
        for dtype in (DataType.DT_UINT8, np.uint8):
            with raising(LE):  # its end may only be read
                create_npu_tensors([2 * page + 1], dtype, [address])
            with raising(LE):
                create_npu_tensors([1], dtype, [address, 4096])
        assert libc.mprotect(ctypes.c_void_p(address + 2 * page), page, 3) == 0
        del buffer
    for shape, addrs, expected in [
        *[([1], [], LE), ([1], [0], LE), ([0], [address], LE), ([], [address], LE), ([2**62, 4], [address], LE)],
        *[([1], (address,), TE), ([1], ["x"], TE), (["1"], [address], TE)],
    ]:
        with raising(expected):
            create_npu_tensors(shape, DataType.DT_UINT8, addrs)  # type: ignore[arg-type]


FAKE = """
import sys, types
import numpy as np
from llm_datadist.original.tensors import create_npu_tensors
assert "torch" not in sys.modules
torch = types.ModuleType("torch")
class dtype:
    def __init__(self, name): self.name = name
    def __repr__(self): return "torch." + self.name
dtype.__module__ = "torch"
class Tensor:
    def __init__(self, source): self.capsule, self.source = source.__dlpack__(), source
torch.from_dlpack = Tensor
sys.modules["torch"] = torch
memory = np.arange(4, dtype=np.uint16)
for name, size in [("float16", 2), ("bfloat16", 2), ("int64", 8), ("bool", 1), ("uint8", 1)]:
    (tensor,) = create_npu_tensors([8 // size], dtype(name), [memory.ctypes.data])
    assert isinstance(tensor, Tensor) and tensor.source.address == memory.ctypes.data
    assert tensor.source.nbytes == 8 and "dltensor" in repr(tensor.capsule)
try:
    create_npu_tensors([1], dtype("complex64"), [memory.ctypes.data])
except TypeError as error:
    assert "complex64" in str(error)
else:
    raise AssertionError
"""


def test_torch_dtypes_give_torch_tensors() -> None:
    """Uses a substitute for the dtypes and for `from_dlpack` of torch. `test_with_torch` uses torch itself."""
    done = in_fresh_process(FAKE)
    assert (done.returncode, done.stderr) == (0, "")


def test_with_torch() -> None:
    torch = pytest.importorskip("torch")
    size = torch.Size([2, 3])
    owner = torch.arange(6, dtype=torch.float32).reshape(size)
    (tensor,) = create_npu_tensors(size, torch.float32, [owner.data_ptr()])
    assert tensor.data_ptr() == owner.data_ptr()
    assert torch.equal(tensor, owner)
    tensor[1, 2] = 9.0
    assert owner[1, 2] == 9.0
    half = torch.ones(4, dtype=torch.bfloat16)
    (tensor,) = create_npu_tensors([4], torch.bfloat16, [half.data_ptr()])
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, half)

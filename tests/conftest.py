"""What must be settled before any test module is imported.

Triton decides when it decorates a function whether to interpret it. Without a GPU its kernels run in the interpreter
on CPU tensors, so TRITON_INTERPRET is set here; ``gpu.py`` says where tensors then live. Subprocesses inherit the
variable: ``test_aot.py``, which compiles for real, takes it out of theirs. With a GPU nothing is interpreted.

``interpreter_converts`` is the one fixture here, for tests in which a kernel reads or writes bfloat16.
"""

import os
from typing import Any

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the cores; threads that meet after every operation would wait for the others' to yield.
    torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # torch 2.11 makes a stand-in for the missing GPU when something first traces, and frees it with the thread that
    # traced (pytorch#178950, a crash). Tests trace on short-lived threads; this one lasts.
    torch._C._ensureCUDADeviceGuardSet()


@pytest.fixture
def interpreter_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert numbers as GPUs do: its bfloat16 is cut off, and its subnormals are wrong."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        before, after = source.dtype.scalar, dtype.scalar
        if before.is_fp32() and after.is_bf16():
            bits = torch.tensor(source.data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        elif before.is_bf16() and after.is_fp32():
            bits = (source.data.astype("uint32") << 16).view("float32")
        else:
            return self.cast_impl(source, dtype)
        return interpreter.TensorHandle(bits, after)

    for name in ("create_fp_trunc", "create_fp_ext"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, cast)

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        # Triton 3.6 makes an integer of an array of one element, which numpy 2.4 no longer does.
        tensor.__index__ = lambda self: int(self.handle.data.reshape(()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)

"""What must be settled before any test module is imported.

Triton decides when it decorates a function whether to interpret it. Without a GPU its kernels run in the interpreter on CPU
tensors, so TRITON_INTERPRET is set here; ``gpu.py`` says where tensors then live. Subprocesses inherit the variable:
``test_aot.py``, which compiles for real, takes it out of theirs. With a GPU nothing is interpreted.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # torch 2.11 makes a stand-in for the missing GPU when something first traces, and frees it with the thread that traced
    # (pytorch#178950, a crash). Tests trace on short-lived threads; this one lasts.
    torch._C._ensureCUDADeviceGuardSet()

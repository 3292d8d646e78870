"""How large a result must be to be worth a node in Python: under ``save="auto"`` PyTorch computes smaller ones."""

import functools

import torch
from torch import Tensor

#: Results of fewer bytes are left to plain PyTorch: at most so much is forgone by a call. A fused call costs the time
#: of an autograd.Function in Python, 60 to 200 us with cold caches. Forward and backward of two layers of 256 features,
#: with a GELU between them, float32, one and two threads (AMD EPYC), took 1.10 to 1.11 times eager's time at 128 KiB,
#: 1.06 to 1.09 at 256 KiB, and 1.03 to 1.05 at 512 KiB; with SiLU 1.10 to 1.22, 1.11 to 1.13, and 1.07 to 1.08.
SMALL_BYTES = 512 << 10
#: The same of layers and convolutions with an activation whose result PyTorch saves too (ReLU, tanh, sigmoid). Forward
#: and backward as above with relu and tanh took 1.05 to 1.31 times eager's time up to 1 MiB. From 2 MiB on the
#: autograd.Function takes less, because it writes dz over y.
MEDIUM_BYTES = 2 << 20
#: The same on a GPU, which waits for the host where its own work is shorter. PyTorch's operation takes one more pass
#: over dz, and a buffer for dz until the layer's backward pass ends.
GPU_MEDIUM_BYTES = 32 << 20
#: On GPUs results are small below so many bytes for each of the processors, 16.5 MiB on an H100. A node in Python takes
#: the host about 0.2 ms more than PyTorch's, forward and backward, for which the GPU waits where its own work is
#: shorter. An H100 took for a dense layer with GELU in bfloat16 (1,024 to 4,096 features) 2.0, 2.2, 2.3 and 2.1 times
#: eager's time at 4, 8, 16 and 32 MiB of results, and 1.01 and 0.98 times at 64 and 128; with 4,096 to 11,008 features
#: 1.26 times at 11 MiB and 1.00 at 22 (training steps that do not wait for each other). From the limit to 64 MiB the
#: layer's width decides, and memory counts more. Slower GPUs have fewer processors, and less memory.
GPU_BYTES = 128 << 10


def limits_of(x: Tensor) -> tuple[int, int]:
    """Results of fewer bytes on the device of x are small, or of medium size."""
    if not x.is_cuda:
        return SMALL_BYTES, MEDIUM_BYTES
    if torch.compiler.is_compiling():
        return SMALL_BYTES, GPU_MEDIUM_BYTES
    return max(SMALL_BYTES, GPU_BYTES * processors(x.get_device())), GPU_MEDIUM_BYTES


@functools.cache
def processors(device: int) -> int:
    """The multiprocessors, or compute units, of a GPU; 0 for one that is not there, which a fake tensor may be on."""
    if device >= torch.cuda.device_count():
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count

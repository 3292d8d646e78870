"""Replace a Linear + GELU pair in a block of your own, and see what it keeps.

    python examples/mlp_block.py

Two ways: the module that replaces the pair, and the function for blocks that call ``F.linear`` themselves.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes


class Block(nn.Module):
    """The usual pre-norm MLP block of a transformer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class FusedBlock(Block):
    """The same block: one line has changed."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(fl.dense_bias_act(self.norm(x), self.up.weight, self.up.bias, "gelu"))


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 197, 192)
    eager, by_function, by_module = Block(192, 768), FusedBlock(192, 768), Block(192, 768)
    by_function.load_state_dict(eager.state_dict())
    by_module.load_state_dict(eager.state_dict())
    sequential = nn.Sequential(by_module.norm, fl.FusedDenseAct.from_modules(by_module.up, nn.GELU()), by_module.down)

    hidden_bytes = x[..., 0].numel() * 768 * x.itemsize
    variants = {"eager": eager, "function": by_function, "module": lambda x: x + sequential(x)}
    for name, block in variants.items():
        buffers = saved_bytes(block, x, exclude=[x]) / hidden_bytes
        difference = float((block(x) - eager(x)).detach().abs().max())
        print(f"{name:<9}{buffers:.2f} hidden-sized buffers saved, largest difference from eager {difference:.1e}")


if __name__ == "__main__":
    main()

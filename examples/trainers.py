"""Fuse a model that somebody else's training loop trains: Hugging Face accelerate's, or Lightning's.

    python examples/trainers.py [--epochs 3]

A perceptron with GELU and dropout learns scikit-learn's handwritten digits: by hand, by accelerate, and,
where it is installed, by Lightning. Each starts from the same seed. (For transformers' ``Trainer`` see
``finetune_bert.py``.)
"""

import argparse
import importlib.util
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fusedlayers as fl

IMAGES, LABELS = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
INPUTS = IMAGES.float() / 16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 10))


def batches() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(INPUTS, LABELS), batch_size=128, shuffle=True, generator=generator)


def by_hand(epochs: int) -> nn.Module:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for inputs, labels in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model


def by_accelerate(epochs: int) -> nn.Module:
    from accelerate import Accelerator

    model = network()
    fl.fuse(model)  # before or after prepare, which may wrap or shard it
    accelerator = Accelerator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    prepared, optimizer, data = accelerator.prepare(model, optimizer, batches())
    for _ in range(epochs):
        for inputs, labels in data:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(prepared(inputs), labels))
            optimizer.step()
    return accelerator.unwrap_model(prepared).cpu()


def by_lightning(epochs: int) -> nn.Module:
    from lightning.pytorch import LightningModule, Trainer

    class Digits(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.network(inputs)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            inputs, labels = batch
            return F.cross_entropy(self(inputs), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=2e-3)

    module = Digits()
    fl.fuse(module)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(max_epochs=epochs, **quiet).fit(module, batches())
    return module.network.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs
    ways: dict[str, Callable[[int], nn.Module]] = {"by hand": by_hand, "accelerate": by_accelerate}
    if importlib.util.find_spec("lightning") is not None:
        ways["lightning"] = by_lightning
    for name, train in ways.items():
        model = train(epochs).eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(INPUTS), LABELS)
        print(f"{name:<12} loss {loss:.6f}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="(accelerate|lightning).*")
    main()
